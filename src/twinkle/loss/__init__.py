"""Losses, one family per file: those a client can name on the wire, and those of the training library on batches."""

from twinkle.loss.base import Loss, LossConfig
from twinkle.loss.batch import BatchLoss, LossOutput
from twinkle.loss.batch_registry import BATCH_LOSSES, create_batch_loss
from twinkle.loss.clipped import Cispo, Ppo
from twinkle.loss.cross_entropy import CrossEntropy
from twinkle.loss.dpo import DPOLoss
from twinkle.loss.dro import Dro
from twinkle.loss.gkd import GKDLoss
from twinkle.loss.grpo import BNPOLoss, CISPOLoss, DRGRPOLoss, GRPOLoss, GSPOLoss, SAPOLoss
from twinkle.loss.gspo import Gspo
from twinkle.loss.infonce import InfonceLoss
from twinkle.loss.likelihood import (
    ChunkedCrossEntropyLoss,
    CrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    MSELoss,
)
from twinkle.loss.policy_gradient import ImportanceSampling, StableReinforce
from twinkle.loss.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from twinkle.loss.registry import LOSSES, create_loss
from twinkle.loss.surrogate import Surrogate, differentiate

torch_loss_mapping = BATCH_LOSSES
"""``BATCH_LOSSES`` under the name scripts import."""

__all__ = [
    "BATCH_LOSSES",
    "LOSSES",
    "BNPOLoss",
    "BatchLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChunkedCrossEntropyLoss",
    "Cispo",
    "CrossEntropy",
    "CrossEntropyLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "Dro",
    "GKDLoss",
    "GRPOLoss",
    "GSPOLoss",
    "Gspo",
    "ImportanceSampling",
    "InfonceLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "Loss",
    "LossConfig",
    "LossOutput",
    "MSELoss",
    "ORPOLoss",
    "Ppo",
    "SAPOLoss",
    "SimPOLoss",
    "StableReinforce",
    "Surrogate",
    "create_batch_loss",
    "create_loss",
    "differentiate",
    "torch_loss_mapping",
]
