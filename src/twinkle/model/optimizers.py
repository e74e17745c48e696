"""Torch's optimizers, under the names scripts ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.model.muon import create_muon
from twinkle.plugin.construct import construct_class

DEFAULT_LR = 1e-5
DEFAULT_WEIGHT_DECAY = 0.01

UNFIT = {
    "LBFGS": "runs the model itself, several times a step; use another",
    "SparseAdam": "takes sparse gradients, which no layer here has; use Adam",
}

OptimizerArg = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of ``torch.optim`` that fits this loop, by its class name."""
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and name not in UNFIT
    }


def create_optimizer(
    optimizer_cls: OptimizerArg,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    lr: float = DEFAULT_LR,
    weight_decay: float = DEFAULT_WEIGHT_DECAY,
    tables: frozenset[str] = frozenset(),
    **settings: Any,
) -> torch.optim.Optimizer:
    """An optimizer over ``parameters`` in two groups: matrices decay, biases and norms (vectors) do not.

    A group without parameters is left out. ``Muon`` steps what it can and leaves the rest to AdamW; ``tables`` are the
    names of parameters that hold embeddings, which it should not step. An optimizer that is made already steps what it
    was made for.
    """
    if isinstance(optimizer_cls, torch.optim.Optimizer):
        return optimizer_cls
    if not parameters:
        raise InvalidInput("adapter_name", "has no parameters to train; add an adapter first")
    name = optimizer_cls.__name__ if isinstance(optimizer_cls, type) else optimizer_cls
    if isinstance(name, str) and name in UNFIT:
        raise InvalidInput("optimizer_cls", f"{name} {UNFIT[name]}")
    if optimizer_cls in (torch.optim.Muon, torch.optim.Muon.__name__):
        return create_muon(parameters, tables=tables, lr=lr, weight_decay=weight_decay, **settings)
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]
    try:
        return construct_class(
            "optimizer_cls",
            optimizer_cls,
            torch.optim.Optimizer,
            known_optimizers(),
            groups,
            wrap=lambda factory: factory(groups, lr=lr, **settings),
            lr=lr,
            **settings,
        )
    except ValueError as error:
        # What an optimizer says of rates it does not take, or that it wants all parameters in one group.
        raise InvalidInput("optimizer_cls", f"{optimizer_cls} cannot be built with these settings: {error}") from error
