"""Whether a text has the form that was asked for."""

from __future__ import annotations

from typing import Any

from twinkle.reward.answers import tagged
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of


class FormatReward(Reward):
    """1 if the completion has both ``<think>...</think>`` and ``<answer>...</answer>``, else 0."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        completions = [completion_of(trajectory) for trajectory in trajectories]
        return [
            1.0 if all(tagged(completion, tag) is not None for tag in ("think", "answer")) else 0.0
            for completion in completions
        ]
