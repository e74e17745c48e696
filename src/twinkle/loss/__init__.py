"""The losses a client can name, one family per file."""

from twinkle.loss.base import Loss, LossConfig
from twinkle.loss.clipped import Cispo, Ppo
from twinkle.loss.cross_entropy import CrossEntropy
from twinkle.loss.dro import Dro
from twinkle.loss.gspo import Gspo
from twinkle.loss.policy_gradient import ImportanceSampling, StableReinforce
from twinkle.loss.registry import LOSSES, create_loss

__all__ = [
    "LOSSES",
    "Cispo",
    "CrossEntropy",
    "Dro",
    "Gspo",
    "ImportanceSampling",
    "Loss",
    "LossConfig",
    "Ppo",
    "StableReinforce",
    "create_loss",
]
