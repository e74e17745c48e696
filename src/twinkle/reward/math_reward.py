"""Formulas that may be written in many ways, asked for in text and by pictures."""

from __future__ import annotations

from typing import Any

from twinkle.reward.answers import boxed_answers, tagged
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of, truths_of
from twinkle.reward.grading import DEFAULT_SECONDS, FormulaGrader

MAX_CHARACTERS = 100_000
"""Of a completion, from its end, in which an answer is looked for."""


class MathReward(Reward):
    r"""1 if what the last ``\boxed{}`` holds equals the truth, written however; else 0.

    Args:
        ground_truth_key: Of ``user_data``; where the truth is a whole solution, its own last box counts.
        seconds: How long one comparison may take; one that takes longer counts as wrong.
    """

    def __init__(self, ground_truth_key: str = "solution", *, seconds: float = DEFAULT_SECONDS) -> None:
        self.ground_truth_key = ground_truth_key
        self._grader = FormulaGrader(seconds)

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        truths = truths_of(trajectories, ground_truths, self.ground_truth_key)
        return [
            self._grade(completion_of(trajectory)[-MAX_CHARACTERS:], truth)
            for trajectory, truth in zip(trajectories, truths, strict=True)
        ]

    def _grade(self, completion: str, truth: str | None) -> float:
        boxed = boxed_answers(completion)
        if not boxed or truth is None:
            return 0.0
        gold = (boxed_answers(truth) or [truth])[-1]
        return 1.0 if self._grader.are_equal(gold, boxed[-1]) else 0.0


class MultiModalAccuracyReward(Reward):
    """1 if what stands between ``<answer>`` and ``</answer>``, else in the last box, is the truth; else 0.

    The truth is ``user_data``'s ``ground_truth``, else its ``solution``; letters' case does not count.
    """

    def __init__(self, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._grader = FormulaGrader(seconds)

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        truths = truths_of(trajectories, ground_truths, "ground_truth", "solution")
        return [
            self._grade(completion_of(trajectory)[-MAX_CHARACTERS:], truth)
            for trajectory, truth in zip(trajectories, truths, strict=True)
        ]

    def _grade(self, completion: str, truth: str | None) -> float:
        answer = _answer(completion)
        if truth is None or not answer:
            return 0.0
        gold = _answer(truth) or truth
        is_equal = gold.strip().lower() == answer.lower() or self._grader.are_equal(gold, answer)
        return 1.0 if is_equal else 0.0


def _answer(text: str) -> str | None:
    found = tagged(text, "answer")
    return found if found is not None else next(iter(reversed(boxed_answers(text))), None)
