"""The process that computes rewards and searches for patterns: asked a ``RewardRequest`` as an object, it answers
``{"score": ...}`` or ``{"error": ...}``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from twinkle.core.process.question_process import answer_questions
from twinkle.grading.grade import RewardRequest
from twinkle.reward import (
    ArithmeticReward,
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    MultiModalAccuracyReward,
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
    Reward,
)

REGEXP = "regexp"
_REWARDS: Mapping[str, type[Reward]] = MappingProxyType(
    {
        "arithmetic": ArithmeticReward,
        "gsm8k": GSM8KAccuracyReward,
        "gsm8k_format": GSM8KFormatReward,
        "math": MathReward,
        "format": FormatReward,
        "multimodal": MultiModalAccuracyReward,
        "olympiad": OlympiadBenchAccuracyReward,
        "olympiad_format": OlympiadBenchFormatReward,
        "olympiad_quality": OlympiadBenchQualityReward,
    }
)


def main() -> None:
    """Answer until there is nothing more to read."""
    logging.disable(logging.CRITICAL)
    answer_questions(_answer)


def _answer(question: Any) -> dict[str, object]:
    try:
        return {"score": score(RewardRequest(**question))}
    except Exception as error:  # noqa: BLE001 - whatever a reward makes of an answer, the next one is judged
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def score(request: RewardRequest) -> float:
    """What an answer is worth."""
    if request.reward == REGEXP:
        return _search(request)
    trajectory = {"messages": [{"role": "assistant", "content": request.text}]}
    return float(_made(request.reward)([trajectory], None if request.truth is None else [request.truth])[0])


def _search(request: RewardRequest) -> float:
    assert request.pattern is not None, "a search has a pattern"
    found = re.search(request.pattern, request.text, re.IGNORECASE if request.ignore_case else 0)
    if found is None:
        return 0.0
    return 1.0 if request.truth is None else float(found.group(request.group) == request.truth)


@cache
def _made(name: str) -> Reward:
    return _REWARDS[name]()


if __name__ == "__main__":
    main()
