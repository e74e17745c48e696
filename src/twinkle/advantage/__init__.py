"""How much better than expected a sampled answer was."""

from twinkle.advantage.base import Advantage, Scale
from twinkle.advantage.gae import GAEAdvantage
from twinkle.advantage.grpo import GRPOAdvantage
from twinkle.advantage.rloo import RLOOAdvantage

__all__ = ["Advantage", "GAEAdvantage", "GRPOAdvantage", "RLOOAdvantage", "Scale"]
