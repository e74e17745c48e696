"""Problems of olympiads, in mathematics and physics; every reward is between 0 and 1."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from twinkle.data_format.conversation import user_data_get
from twinkle.reward.answers import boxed_answers, number_of, split_at_commas
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of, truths_of
from twinkle.reward.grading import DEFAULT_SECONDS, FormulaGrader, compact

MAX_CHARACTERS = 100_000
MAX_ANSWERS = 20
"""Of a completion, from its end: whoever boxes everything is right by chance only."""
RELATIVE_TOLERANCE = 0.01
"""Physics answers are rounded on the way."""
NEAR = 0.5
"""What an answer that is near earns at most; it falls by ``exp(-5 error)`` with the relative error."""
END_CHARACTERS = 200
GOOD_LENGTH = (300, 1500)
LONGEST = 6000
WORDS_TOGETHER = 4
STEPS = re.compile(
    r"\bstep\s?\d|\b(?:first|then|finally|therefore|hence|thus)\b|第\S{1,3}步|首先|其次|然后|最后|因此|所以",
    re.IGNORECASE,
)
OPERATORS = re.compile(r"[-+*/^]|\\frac|\\sqrt")


class OlympiadBenchAccuracyReward(Reward):
    r"""1 for a right answer in the last ``\boxed{}``, up to 0.5 for a number that is near, else 0.

    A problem with several answers (its truth has commas, or ``user_data`` says ``is_multiple_answer``) earns the share
    of them that was boxed, each counted once.
    """

    def __init__(self, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._grader = FormulaGrader(seconds)

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        truths = truths_of(trajectories, ground_truths, "ground_truth")
        rewards = []
        for trajectory, truth in zip(trajectories, truths, strict=True):
            boxed = boxed_answers(completion_of(trajectory)[-MAX_CHARACTERS:])[-MAX_ANSWERS:]
            if truth is None or not boxed:
                rewards.append(0.0)
                continue
            wanted = split_at_commas(truth)
            is_single = user_data_get(trajectory.get("user_data"), "is_multiple_answer") is False or len(wanted) == 1
            rewards.append(self._grade_one(truth, boxed[-1]) if is_single else self._grade_several(wanted, boxed))
        return rewards

    def _grade_one(self, truth: str, answer: str) -> float:
        if self._is_right(truth, answer):
            return 1.0
        given, wanted = number_of(answer), number_of(truth)
        if given is None or not wanted or not math.isfinite(given):
            return 0.0
        return NEAR * math.exp(-5 * abs(given - wanted) / abs(wanted))

    def _grade_several(self, wanted: Sequence[str], boxed: Sequence[str]) -> float:
        given = [part for answer in boxed for part in split_at_commas(answer)][-MAX_ANSWERS:]
        right = 0
        for truth in wanted:
            match = next((answer for answer in given if self._is_right(truth, answer)), None)
            if match is not None:
                given.remove(match)
                right += 1
        return right / len(wanted)

    def _is_right(self, truth: str, answer: str) -> bool:
        given, wanted = _plain_number(answer), _plain_number(truth)
        if given is not None and wanted is not None:
            return abs(given - wanted) <= RELATIVE_TOLERANCE * abs(wanted)
        return self._grader.are_equal(truth, answer)


class OlympiadBenchFormatReward(Reward):
    """0.4 for a boxed answer, 0.3 if it is at the end, 0.3 if all boxes agree; 0.3 less for three answers or more."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        return [_format_of(completion_of(trajectory)[-MAX_CHARACTERS:]) for trajectory in trajectories]


class OlympiadBenchQualityReward(Reward):
    """0.4 for reasoning that shows (equations, operators, words of a deduction, a conclusion), 0.3 for a fit length,
    0.3 for not repeating itself.
    """

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        completions = [completion_of(trajectory)[-MAX_CHARACTERS:] for trajectory in trajectories]
        return [0.4 * _reasoning(text) + 0.3 * _length(len(text)) + 0.3 * _variety(text) for text in completions]


def _format_of(text: str) -> float:
    boxed = boxed_answers(text)
    if not boxed:
        return 0.0
    distinct = len({compact(answer) for answer in boxed})
    is_at_end = len(text) - text.rfind("\\boxed") < END_CHARACTERS
    score = 0.4 + 0.3 * is_at_end + (0.3 if distinct == 1 else -0.3 if distinct > 2 else 0.0)
    return max(0.0, score)


def _reasoning(text: str) -> float:
    signs = (
        text.count("=") - 2 * text.count("==") >= 3,
        len(OPERATORS.findall(text)) >= 5,
        STEPS.search(text) is not None,
        bool(boxed_answers(text[-500:])),
    )
    return sum(signs) / len(signs)


def _length(num_characters: int) -> float:
    low, high = GOOD_LENGTH
    if num_characters <= high:
        return min(1.0, num_characters / low)
    return max(0.25, 1.0 - 0.75 * (num_characters - high) / (LONGEST - high))


def _variety(text: str) -> float:
    """The share of different runs of words."""
    words = text.split()
    runs = [tuple(words[start : start + WORDS_TOGETHER]) for start in range(len(words) - WORDS_TOGETHER + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def _plain_number(text: str) -> float | None:
    found = compact(text)
    return number_of(found) if re.fullmatch(r"[-+]?[\d.,]{1,100}(?:e[-+]?\d{1,3})?", found, re.ASCII) else None
