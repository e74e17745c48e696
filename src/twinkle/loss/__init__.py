"""Losses: those a client can name on the wire (``datum_losses``), and those of the training library on batches."""

from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Loss
from twinkle.loss.datum import DatumLoss, LossConfig
from twinkle.loss.datum_losses import (
    DATUM_LOSSES,
    Cispo,
    CrossEntropy,
    Dro,
    Gspo,
    ImportanceSampling,
    Ppo,
    StableReinforce,
    create_datum_loss,
)
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
from twinkle.loss.preference import PreferenceLossBase
from twinkle.loss.reference_free import CPOLoss, ORPOLoss, SimPOLoss
from twinkle.loss.registry import LOSSES, create_loss
from twinkle.loss.surrogate import Surrogate, differentiate
from twinkle.loss.traced import TracedLoss
from twinkle.loss.value import PPOValueLoss

torch_loss_mapping = LOSSES
"""``LOSSES`` under the name scripts import."""

__all__ = [
    "DATUM_LOSSES",
    "LOSSES",
    "BNPOLoss",
    "CISPOLoss",
    "CPOLoss",
    "ChunkedCrossEntropyLoss",
    "Cispo",
    "CrossEntropy",
    "CrossEntropyLoss",
    "DPOLoss",
    "DRGRPOLoss",
    "DatumLoss",
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
    "PPOLoss",
    "PPOValueLoss",
    "Ppo",
    "PreferenceLossBase",
    "SAPOLoss",
    "SimPOLoss",
    "StableReinforce",
    "Surrogate",
    "TracedLoss",
    "create_datum_loss",
    "create_loss",
    "differentiate",
    "torch_loss_mapping",
]
