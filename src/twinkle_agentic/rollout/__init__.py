"""Conversations of several turns with a sampler, or with a model behind an address."""

from twinkle_agentic.rollout.api_multi_turn import APIMultiTurnRollout
from twinkle_agentic.rollout.base import Rollout
from twinkle_agentic.rollout.bridge import extend_with_bridge
from twinkle_agentic.rollout.multi_turn import MultiTurnRollout
from twinkle_agentic.rollout.multi_turn_condense import MultiTurnCondenseRollout

__all__ = ["APIMultiTurnRollout", "MultiTurnCondenseRollout", "MultiTurnRollout", "Rollout", "extend_with_bridge"]
