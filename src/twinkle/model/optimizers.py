"""Torch's optimizers, under the names scripts ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.plugin.construct import construct_class

DEFAULT_LR = 1e-5
DEFAULT_WEIGHT_DECAY = 0.01

OptimizerArg = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every optimizer of ``torch.optim`` by its class name."""
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }


def create_optimizer(
    optimizer_cls: OptimizerArg,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    lr: float = DEFAULT_LR,
    weight_decay: float = DEFAULT_WEIGHT_DECAY,
    **settings: Any,
) -> torch.optim.Optimizer:
    """An optimizer over ``parameters`` in two groups: matrices decay, biases and norms (vectors) do not.

    A group without parameters is left out.
    """
    if isinstance(optimizer_cls, torch.optim.Optimizer):
        return optimizer_cls
    if not parameters:
        raise InvalidInput("adapter_name", "has no parameters to train; add an adapter first")
    matrices = [parameter for parameter in parameters.values() if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() < 2]
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((matrices, weight_decay), (vectors, 0.0))
        if members
    ]
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
