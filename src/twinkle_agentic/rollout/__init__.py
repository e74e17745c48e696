"""Conversations of several turns with a sampler."""

from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.bridge import extend_with_bridge
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout

__all__ = ["MultiTurnRollout", "Rollout", "extend_with_bridge"]
