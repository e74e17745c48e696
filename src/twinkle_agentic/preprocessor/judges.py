"""What a model or a list of words decides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinkle.core.errors import InvalidInput
from twinkle.reward.answers import NUMBER
from twinkle_agentic.preprocessor.base import QualityFilter, Row, messages_of, said_by, with_key_rounds
from twinkle_agentic.preprocessor.rules import whole_text

INTENTS: Mapping[str, str] = {
    "code": r"\bcode\b|\bpython\b|\bfunction\b|\bbug\b|\bsql\b|\bscript\b|```|代码|函数|编程",
    "math": r"\bsolve\b|\bequation\b|\bprove\b|\bintegral\b|\bhow many\b|\\frac|\d\s*[-+*/=]\s*\d|计算|证明|方程",
    "translation": r"\btranslate\b|\btranslation\b|翻译",
    "summary": r"\bsummar(?:y|ise|ize)\b|\btl;?dr\b|总结|摘要|概括",
    "writing": r"\bwrite (?:a|an|me)\b|\bpoem\b|\bstory\b|\bessay\b|\bemail\b|写一|作文|故事|诗",
    "question": r"\?|\bwhat\b|\bwhy\b|\bwho\b|\bwhen\b|\bwhere\b|\bhow\b|？|什么|为什么|谁|怎么|如何",
}
OTHER = "chat"
GOOD_MODELS = (
    r"qwen/qwen3",
    r"deepseek-ai/deepseek-(?:r1|v[34])",
    r"moonshotai/kimi-k2",
    r"(?:zai-org|z-ai|zhipuai)/glm-[45]",
    r"minimax(?:ai)?/minimax-m",
    r"openai/gpt-oss",
)
MAX_CHARACTERS = 20_000
ASK = (
    "Judge the following conversation. {question}\nAnswer with one number from 0 (not at all) to 1 (entirely) and"
    " nothing else.\n\n{text}"
)


class IntentDetector(Protocol):
    """Finds the turns of one intent."""

    intent: str

    def __call__(self, messages: Sequence[Mapping[str, Any]], /) -> Sequence[int]:
        """The numbers of the assistant's messages that are of the intent."""
        ...


class IntentClassifier(QualityFilter):
    """Names in ``intent`` what a conversation is about, by the words of its questions; drops nothing.

    Args:
        intents: By name a regular expression; the first that is found counts.
        detectors: In place of them: each finds turns of its intent, the first that finds a turn has it. The intent of
            most turns is the conversation's; ``user_data`` gets the turns as ``key_rounds``, which then alone train.
            One with ``definitive`` ends the search if it finds any.
        intent_field: The column for it.
    """

    def __init__(
        self,
        intents: Mapping[str, str] = INTENTS,
        *,
        detectors: Sequence[IntentDetector] | None = None,
        intent_field: str = "intent",
    ) -> None:
        super().__init__()
        self.adds = (intent_field,)
        self._patterns = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in intents.items()}
        self._detectors = detectors
        self._field = intent_field

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        if self._detectors is not None:
            return self._detected(row, self._detectors)
        asked = "\n".join(said_by(row, "user"))[:MAX_CHARACTERS]
        found = (name for name, pattern in self._patterns.items() if pattern.search(asked))
        return {**row, self._field: next(found, OTHER)}

    def _detected(self, row: Row, detectors: Sequence[IntentDetector]) -> Row:
        turns: dict[int, str] = {}
        for detector in detectors:
            found = list(detector(messages_of(row)))
            turns = {**dict.fromkeys(found, detector.intent), **turns}
            if found and getattr(detector, "definitive", False):
                break
        if not turns:
            return {**row, self._field: OTHER}
        ((intent, _),) = Counter(turns.values()).most_common(1)
        return {**row, self._field: intent, "user_data": with_key_rounds(row, sorted(turns))}


class ModelFilter(QualityFilter):
    """Keeps rows that certain models wrote.

    Args:
        patterns: Regular expressions, case aside, each of the beginning of a model's id (``qwen/qwen3`` holds for all
            of that family); ids of open models known to answer well if omitted.
        field: The column that has the id.
    """

    def __init__(self, patterns: Sequence[str] | None = None, field: str = "model_id") -> None:
        super().__init__()
        chosen = GOOD_MODELS if patterns is None else patterns
        if isinstance(chosen, str) or not chosen:
            raise InvalidInput("patterns", "are none, or one text; send a list of regular expressions")
        self._field = field
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in chosen), re.IGNORECASE)

    def reason(self, row: Row) -> str | None:
        """See :class:`QualityFilter`."""
        return None if self._pattern.match(str(row.get(self._field) or "")) else "model not wanted"


class JudgeFilter(QualityFilter):
    """Keeps rows that a model gives enough points.

    Args:
        sampler: With a template set, or one of a service.
        question: What it is to judge.
        min_score: Of 0 to 1.
        sampling_params: One greedy answer of a few tokens if omitted.
    """

    adds = ("quality_score",)

    def __init__(
        self,
        sampler: Any,
        question: str = "Is the answer right, complete and well written?",
        *,
        min_score: float = 0.5,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= min_score <= 1:
            raise InvalidInput("min_score", f"is {min_score}; send 0 to 1")
        self._sampler = sampler
        self._question = question
        self._min_score = min_score
        self._params = dict(sampling_params or {"max_tokens": 8, "temperature": 0.0})

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with enough points, which are judged in one call; they are noted as ``quality_score``."""
        if not rows:
            return []
        prompts = [
            {"messages": [{"role": "user", "content": ASK.format(question=self._question, text=_shown(row))}]}
            for row in rows
        ]
        responses = self._sampler.sample(prompts, self._params)
        kept: list[Row] = []
        for row, response in zip(rows, responses, strict=True):
            score = _score(response["sequences"][0].get("decoded") or "")
            if score is not None and score >= self._min_score:
                kept.append({**row, "quality_score": score})
            else:
                self.leave(row, "no score" if score is None else "low score")
        return kept


def _shown(row: Row) -> str:
    return whole_text(row)[:MAX_CHARACTERS]


def _score(answer: str) -> float | None:
    found = NUMBER.search(answer)
    value = float(found.group().replace(",", "")) if found else None
    return value if value is not None and 0 <= value <= 1 else None
