"""How good a conversation with tools was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format.conversation import user_data_get
from twinkle.reward.answers import boxed_answers
from twinkle.reward.base import GroundTruths, Reward, Trajectories, completion_of, text_of, truths_of

__all__ = ["CoTReward", "F1Reward", "ToolExploreReward"]

MAX_CHARACTERS = 100_000
"""Of a completion, from its end."""
ARTICLES = frozenset(("a", "an", "the"))
WORD = re.compile(r"\w+")
STEP = re.compile(r"^[ \t]*step[ \t]*(\d{1,6})[ \t]*[.:]", re.IGNORECASE | re.MULTILINE)
FEW_STEPS, MANY_STEPS = 3, 7
FEW_CALLS = 3


class F1Reward(Reward):
    r"""How much the words of the last ``\boxed{}`` have in common with a truth's: their F1, the best of all truths.

    Args:
        answer_pattern: A regular expression whose last match (its first group) is the answer where there is no box.
    """

    def __init__(self, answer_pattern: str | re.Pattern[str] | None = None) -> None:
        self._pattern = re.compile(answer_pattern) if isinstance(answer_pattern, str) else answer_pattern

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory, 0 to 1."""
        given = truths_of(trajectories, ground_truths, "ground_truth")
        rewards = []
        for trajectory, truth in zip(trajectories, given, strict=True):
            truths = [truth] if truth is not None else []
            if not ground_truths:
                truths = _truths(trajectory) or truths
            answer = self._answer(completion_of(trajectory)[-MAX_CHARACTERS:])
            rewards.append(max((f1_of(answer, each) for each in truths), default=0.0) if answer else 0.0)
        return rewards

    def _answer(self, completion: str) -> str:
        boxed = boxed_answers(completion)
        if boxed or self._pattern is None:
            return boxed[-1] if boxed else ""
        matches = [match.group(1) if match.re.groups else match.group() for match in self._pattern.finditer(completion)]
        return (matches[-1] or "").strip() if matches else ""


class CoTReward(Reward):
    """0.3 for 3 to 6 numbered steps (``Step 1: ...``) and a boxed answer, 0.1 for more steps, else 0."""

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        return [_steps_reward(_all_said(trajectory)[-MAX_CHARACTERS:]) for trajectory in trajectories]


class ToolExploreReward(Reward):
    """Of conversations whose answer is right enough: 1 for one to three turns with a call that worked, 0.5 for more.

    Args:
        f1_threshold: What counts as right enough (:class:`F1Reward`).
        answer_pattern: See :class:`F1Reward`.
    """

    def __init__(self, f1_threshold: float = 0.5, answer_pattern: str | re.Pattern[str] | None = None) -> None:
        self._threshold = f1_threshold
        self._f1 = F1Reward(answer_pattern)

    def __call__(self, trajectories: Trajectories, ground_truths: GroundTruths = None, **kwargs: Any) -> list[float]:
        """One number for each trajectory."""
        scores = self._f1(trajectories, ground_truths)
        return [
            _calls_reward(trajectory) if score >= self._threshold else 0.0
            for trajectory, score in zip(trajectories, scores, strict=True)
        ]


def f1_of(answer: str, truth: str) -> float:
    """The harmonic mean of the shares of words that both have, case, punctuation and articles aside."""
    given, wanted = _words(answer), _words(truth)
    if not given or not wanted:
        return float(given == wanted)
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted))


def _words(text: str) -> list[str]:
    return [word for word in WORD.findall(text.lower()) if word not in ARTICLES]


def _truths(trajectory: Mapping[str, Any]) -> list[str]:
    """All that ``user_data`` names: a question may have several right answers."""
    found = []
    for item in trajectory.get("user_data") or []:
        value = user_data_get([item], "ground_truth")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return [str(value) for value in found]


def _all_said(trajectory: Mapping[str, Any]) -> str:
    messages = trajectory.get("messages") or []
    return "\n".join(text_of(message.get("content")) for message in messages if message.get("role") == "assistant")


def _steps_reward(text: str) -> float:
    steps = len(set(STEP.findall(text)))
    if not boxed_answers(text) or steps < FEW_STEPS:
        return 0.0
    return 0.3 if steps < MANY_STEPS else 0.1


def _calls_reward(trajectory: Mapping[str, Any]) -> float:
    worked = _turns_that_worked(trajectory.get("messages") or [])
    return 0.0 if not worked else 1.0 if worked <= FEW_CALLS else 0.5


def _turns_that_worked(messages: Sequence[Mapping[str, Any]]) -> int:
    """Turns with calls of which one came back with something that is no error."""
    worked = 0
    is_open = False
    for message in messages:
        if message.get("role") == "assistant":
            is_open = bool(message.get("tool_calls"))
        elif message.get("role") == "tool" and is_open:
            told = text_of(message.get("content")).strip()
            if told and not told.lower().startswith("error"):
                worked += 1
                is_open = False
    return worked
