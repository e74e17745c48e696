"""Batch losses by class name (``GRPOLoss``) or short name (``grpo``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.loss.base import Loss
from twinkle.loss.dpo import DPOLoss
from twinkle.loss.gkd import GKDLoss
from twinkle.loss.grpo import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, PPOLoss, SAPOLoss
from twinkle.loss.infonce import InfonceLoss
from twinkle.loss.likelihood import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    MSELoss,
)
from twinkle.loss.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from twinkle.loss.value import PPOValueLoss

LOSSES: Mapping[str, type[Loss]] = MappingProxyType(
    {
        "mse": MSELoss,
        "cross_entropy": CrossEntropyLoss,
        "chunked_cross_entropy": ChunkedCrossEntropyLoss,
        "liger_fused_linear_cross_entropy": LigerFusedLinearCrossEntropyLoss,
        "gkd": GKDLoss,
        "grpo": GRPOLoss,
        "gspo": GSPOLoss,
        "sapo": SAPOLoss,
        "cispo": CISPOLoss,
        "bnpo": BNPOLoss,
        "dr_grpo": DRGRPOLoss,
        "ppo": PPOLoss,
        "ppo_value": PPOValueLoss,
        "dpo": DPOLoss,
        "simpo": SimPOLoss,
        "cpo": CPOLoss,
        "orpo": ORPOLoss,
        "infonce": InfonceLoss,
    }
)
_BY_CLASS_NAME = MappingProxyType({loss.__name__: loss for loss in LOSSES.values()})


def create_loss(name: str, **settings: Any) -> Loss:
    """The named loss built with ``settings``, or ``InvalidInput`` that lists what there is."""
    loss = _BY_CLASS_NAME.get(name) or LOSSES.get(name)
    if loss is None:
        raise InvalidInput("loss_cls", f"{name!r} is not known; use one of {', '.join(sorted(_BY_CLASS_NAME))}")
    try:
        return loss(**settings)
    except TypeError as error:
        raise InvalidInput("loss_cls", f"{name} cannot be built with these settings: {error}") from error
