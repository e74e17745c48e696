"""Torch's optimizers under Megatron's names; their state spread over the ranks that hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.model.megatron.layout import Layout
from twinkle.model.optimizers import OptimizerArg, create_optimizer, known_optimizers

MEGATRONS = ("default", "MegatronOptimizer", "Adam")
"""Names of Megatron's optimizer, whose weight decay is apart from the gradient: torch's AdamW."""
TORCHS = "AdamW"

log = event_log()


def megatron_optimizer(
    optimizer_cls: OptimizerArg,
    parameters: Mapping[str, torch.nn.Parameter],
    layout: Layout,
    *,
    is_distributed: bool,
    lr: float,
    weight_decay: float,
    tables: frozenset[str],
    **settings: Any,
) -> torch.optim.Optimizer:
    """An optimizer over this rank's parameters.

    With ``is_distributed`` each data rank keeps the state of its share of them, steps it, and sends the others the
    new values (ZeRO, stage 1).

    Raises:
        InvalidInput: It is unknown, does not take the settings, or cannot be spread.
    """
    if optimizer_cls in MEGATRONS:
        optimizer_cls = TORCHS
    group = layout.groups.dp_cp
    shares_experts = (layout.mesh.ep_size or 1) > 1
    if is_distributed and group.size() > 1 and shares_experts:
        log.info("megatron.optimizer.whole", next="with ep_size every rank keeps its own optimizer's state whole")
    if not is_distributed or group.size() == 1 or shares_experts:
        return create_optimizer(optimizer_cls, parameters, lr=lr, weight_decay=weight_decay, tables=tables, **settings)
    kind = known_optimizers().get(optimizer_cls) if isinstance(optimizer_cls, str) else optimizer_cls
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Muon:
        raise InvalidInput(
            "optimizer_cls",
            f"{optimizer_cls!r} cannot be spread over data ranks; name one of torch.optim but Muon, or make the model"
            " with use_distributed_optimizer=False",
        )

    def spread(groups: Any, *, lr: float, **others: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(groups, optimizer_class=kind, process_group=group, lr=lr, **others)

    return create_optimizer(spread, parameters, lr=lr, weight_decay=weight_decay, tables=tables, **settings)
