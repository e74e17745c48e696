"""Losses by the name they have on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinkle.core.errors import InvalidInput
from twinkle.loss.base import Loss, LossConfig
from twinkle.loss.clipped import Cispo, Ppo
from twinkle.loss.cross_entropy import CrossEntropy
from twinkle.loss.dro import Dro
from twinkle.loss.gspo import Gspo
from twinkle.loss.policy_gradient import ImportanceSampling, StableReinforce

LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {loss.name: loss for loss in (CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, StableReinforce)}
)


def create_loss(name: str, config: LossConfig) -> Loss:
    """The named loss with its settings, or ``InvalidInput`` that lists what there is."""
    if name not in LOSSES:
        raise InvalidInput("loss_fn", f"{name!r} is not known; use one of {', '.join(sorted(LOSSES))}")
    return LOSSES[name].from_config(config)
