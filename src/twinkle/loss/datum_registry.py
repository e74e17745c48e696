"""Losses by the name they have on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinkle.core.errors import InvalidInput
from twinkle.core.loss_graph import LossGraph
from twinkle.loss.clipped import Cispo, Ppo
from twinkle.loss.cross_entropy import CrossEntropy
from twinkle.loss.datum import DatumLoss, LossConfig
from twinkle.loss.dro import Dro
from twinkle.loss.gspo import Gspo
from twinkle.loss.policy_gradient import ImportanceSampling, StableReinforce
from twinkle.loss.traced import TracedLoss

DATUM_LOSSES: Mapping[str, type[DatumLoss]] = MappingProxyType(
    {loss.name: loss for loss in (CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, StableReinforce)}
)


def create_datum_loss(name: str, config: LossConfig, graph: LossGraph | None = None) -> DatumLoss:
    """The named loss with its settings, or ``InvalidInput`` that lists what there is; ``custom`` is its ``graph``."""
    if name == TracedLoss.name:
        if graph is None:
            raise InvalidInput("loss_fn", "'custom' needs the graph of a loss; create one and name it by its loss_id")
        return TracedLoss(graph=graph)
    if name not in DATUM_LOSSES:
        known = ", ".join(sorted([*DATUM_LOSSES, TracedLoss.name]))
        raise InvalidInput("loss_fn", f"{name!r} is not known; use one of {known}")
    return DATUM_LOSSES[name].from_config(config)
