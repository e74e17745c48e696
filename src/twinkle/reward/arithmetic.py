"""Sums and the like: the answer ends with a number."""

from __future__ import annotations

import math
from typing import Any

from twinkle.reward.answers import number_of
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of, truths_of

TAIL_CHARACTERS = 400
"""The number is looked for at the end."""
RELATIVE_TOLERANCE = 1e-6


class ArithmeticReward(Reward):
    """1 if the last number of the completion is that of the ``ground_truth``; else 0."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        truths = truths_of(trajectories, ground_truths, "ground_truth")
        return [
            _is_right(number_of(completion_of(trajectory)[-TAIL_CHARACTERS:]), truth)
            for trajectory, truth in zip(trajectories, truths, strict=True)
        ]


def _is_right(given: float | None, truth: str | None) -> float:
    wanted = None if truth is None else number_of(truth)
    if given is None or wanted is None:
        return 0.0
    return 1.0 if math.isclose(given, wanted, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE) else 0.0
