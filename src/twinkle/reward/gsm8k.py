"""Grade-school problems, whose answer is one number."""

from __future__ import annotations

import math
from typing import Any

from twinkle.reward.answers import boxed_answers, hashed_answer, number_of
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of, truths_of

TAIL_CHARACTERS = 500
"""The answer is looked for at the end: what stands before is reasoning."""
TOLERANCE = 1e-5


class GSM8KAccuracyReward(Reward):
    r"""1 if the number in the last ``\boxed{}``, else after the last ``####``, is the ``ground_truth``; else 0."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        truths = truths_of(trajectories, ground_truths, "ground_truth")
        return [
            _is_right(given_answer(completion_of(trajectory)), truth)
            for trajectory, truth in zip(trajectories, truths, strict=True)
        ]


class GSM8KFormatReward(Reward):
    r"""1 if the completion ends with an answer that can be found: ``\boxed{}`` or ``####``; else 0."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        return [1.0 if given_answer(completion_of(trajectory)) else 0.0 for trajectory in trajectories]


def given_answer(completion: str) -> str | None:
    """The answer that a completion ends with."""
    tail = completion[-TAIL_CHARACTERS:]
    boxed = boxed_answers(tail)
    return boxed[-1] if boxed else hashed_answer(tail)


def _is_right(answer: str | None, truth: str | None) -> float:
    if answer is None or truth is None:
        return 0.0
    # The data set's own answers end with '#### 42'.
    stated = hashed_answer(truth) or truth
    given, wanted = number_of(answer), number_of(stated)
    if given is None or wanted is None:
        return 1.0 if answer.strip() == stated.strip() else 0.0
    return 1.0 if math.isfinite(given) and abs(given - wanted) < TOLERANCE else 0.0
