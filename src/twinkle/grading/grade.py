"""A grader applied to one answer. Models and the library's rewards are asked through protocols.

What fails, or takes too long, scores 0 and is told as a problem beside the score: a grade always comes of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from twinkle.core.formulas import FormulaFailed
from twinkle.core.placeholders import MAX_FILLED_CHARACTERS, PlaceMissing
from twinkle.grading.similarity import TextsTooLong, similarity
from twinkle.wire.bodies.graders import (
    Grader,
    JudgeSampling,
    LabelModelGrader,
    ModelGraderPart,
    MultiGrader,
    PlainGrader,
    RegexpGrader,
    RewardGrader,
    ScoreModelGrader,
    StringCheckGrader,
    TextSimilarityGrader,
    parts_of,
    places_in,
)

FAILED_SCORE = 0.0
_NUMBER = re.compile(r"[-+]?(?:\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})(?:[eE][-+]?\d{1,3})?")
MAX_JUDGEMENT_CHARACTERS = 20_000
"""Of a model's judgement, from its end, in which the score is looked for."""


class ProblemKind(StrEnum):
    """Why a grader gave no score of its own, by OpenAI's names."""

    FORMULA = "formula_parse_error"
    VARIABLE = "invalid_variable_error"
    SAMPLE = "sample_parse_error"
    JUDGE_ANSWER = "model_grader_parse_error"
    JUDGE = "model_grader_server_error"
    TIMEOUT = "unresponsive_reward_error"
    OTHER = "other_error"


class GraderFailed(Exception):
    """A grader gives no score for an answer."""

    def __init__(self, kind: ProblemKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Problem:
    """A grader that gave no score of its own."""

    grader: str
    kind: ProblemKind
    message: str


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What an answer is worth.

    Attributes:
        score: The grader's.
        scores: Of its parts, by name.
        problems: What failed on the way; each counted as ``FAILED_SCORE``.
        judge_tokens: What models that judge have read and written, by model.
    """

    score: float
    scores: Mapping[str, float]
    problems: tuple[Problem, ...] = ()
    judge_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What is judged: a text, and the row that it answers."""

    text: str
    item: Mapping[str, Any]

    def values(self) -> dict[str, object]:
        """What the places of a grader's texts are filled from."""
        sample: dict[str, object] = {"output_text": self.text}
        try:
            sample["output_json"] = json.loads(self.text)
        except (ValueError, RecursionError):
            pass  # then a place that asks for it finds nothing, which is told as such
        return {"sample": sample, "item": self.item}


@dataclass(frozen=True)
class Judgement:
    """What a model answered, and what it took."""

    text: str
    num_tokens: int


class Judges(Protocol):
    """Asks the models that are served."""

    async def ask(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: JudgeSampling, *, grader: str
    ) -> Judgement:
        """A model's answer to a conversation.

        Raises:
            GraderFailed: There is no such model, or it did not answer.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class RewardRequest:
    """One answer for the library's rewards or a search; plain values, for another process.

    Attributes:
        reward: The reward's name; ``regexp`` is the search for ``pattern``.
        text: The answer.
        truth: What it is compared with.
        pattern: What is looked for.
        group: Of the pattern, whose text is compared with the truth.
        ignore_case: Of the search.
    """

    reward: str
    text: str
    truth: str | None = None
    pattern: str | None = None
    group: int = 0
    ignore_case: bool = False


class Rewards(Protocol):
    """Computes what may take long, within bounds."""

    async def grade(self, request: RewardRequest) -> float:
        """The score.

        Raises:
            GraderFailed: It took too long, or took its process down.
        """
        ...


async def grade(grader: Grader, answer: Answer, judges: Judges, rewards: Rewards) -> Grade:
    """What an answer is worth by a grader."""
    values = answer.values()
    scores: dict[str, float] = {}
    problems: list[Problem] = []
    judge_tokens: dict[str, int] = {}
    for name, part in parts_of(grader).items():
        try:
            scores[name] = await _score(part, name, values, judges, rewards, judge_tokens)
        except GraderFailed as error:
            scores[name] = FAILED_SCORE
            problems.append(Problem(name, error.kind, str(error)))
    score = next(iter(scores.values()))
    if isinstance(grader, MultiGrader):
        try:
            score = grader.formula().value(scores)
        except FormulaFailed as error:
            score = FAILED_SCORE
            problems.append(Problem(grader.name, ProblemKind.FORMULA, str(error)))
    return Grade(score=score, scores=scores, problems=tuple(problems), judge_tokens=judge_tokens)


async def _score(
    part: PlainGrader,
    name: str,
    values: Mapping[str, object],
    judges: Judges,
    rewards: Rewards,
    judge_tokens: dict[str, int],
) -> float:
    if isinstance(part, ModelGraderPart):
        messages = _messages(part, values)
        judgement = await judges.ask(part.model, messages, part.sampling_params or JudgeSampling(), grader=name)
        judge_tokens[part.model] = judge_tokens.get(part.model, 0) + judgement.num_tokens
        return _score_of(part, judgement.text)
    given = _filled(part.input, values)
    reference = None if part.reference is None else _filled(part.reference, values)
    match part:
        case StringCheckGrader():
            return _check(part.operation, given, reference or "")
        case TextSimilarityGrader():
            try:
                # A tenth of a second at most, but not on an event loop.
                return await asyncio.to_thread(similarity, part.evaluation_metric, given, reference or "")
            except TextsTooLong as error:
                raise GraderFailed(ProblemKind.OTHER, str(error)) from error
        case RewardGrader():
            return await rewards.grade(RewardRequest(reward=part.reward, text=given, truth=reference))
        case RegexpGrader():
            return await rewards.grade(
                RewardRequest(
                    reward="regexp",
                    text=given,
                    truth=reference,
                    pattern=part.pattern,
                    group=part.group,
                    ignore_case=part.ignore_case,
                )
            )
    raise AssertionError(f"a grader of type {part.type}")


def _messages(part: ModelGraderPart, values: Mapping[str, object]) -> list[dict[str, str]]:
    messages, num_characters = [], 0
    for message in part.input:
        content = ""
        for text in message.texts():
            content += _filled(text, values)
            if num_characters + len(content) > MAX_FILLED_CHARACTERS:
                raise GraderFailed(
                    ProblemKind.VARIABLE, f"the judge's messages have more than {MAX_FILLED_CHARACTERS} characters"
                )
        num_characters += len(content)
        messages.append({"role": message.role, "content": content})
    return messages


def _filled(text: str, values: Mapping[str, object]) -> str:
    try:
        return places_in(text).fill(values)
    except PlaceMissing as error:
        is_of_sample = str(error).startswith("there is no sample.")
        raise GraderFailed(ProblemKind.SAMPLE if is_of_sample else ProblemKind.VARIABLE, str(error)) from error


def _check(operation: str, given: str, reference: str) -> float:
    match operation:
        case "eq":
            return float(given == reference)
        case "ne":
            return float(given != reference)
        case "like":
            return float(reference in given)
    return float(reference.casefold() in given.casefold())


def _score_of(grader: ScoreModelGrader | LabelModelGrader, judgement: str) -> float:
    text = judgement[-MAX_JUDGEMENT_CHARACTERS:].strip()
    stated = _stated(text)
    if isinstance(grader, LabelModelGrader):
        label = _label(grader.labels, text if stated is None else str(stated))
        return float(label in grader.passing_labels)
    number = stated if isinstance(stated, int | float) and not isinstance(stated, bool) else None
    if number is None:
        numbers = _NUMBER.findall(text if stated is None else str(stated))
        number = float(numbers[-1]) if numbers else None
    low, high = grader.range
    if number is None or not low <= number <= high:
        raise GraderFailed(ProblemKind.JUDGE_ANSWER, f"the judgement holds no number from {low:g} to {high:g}")
    return float(number)


def _stated(text: str) -> object:
    """What a judgement in JSON says: its ``result``, else its ``score`` or ``label``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return next((value[key] for key in ("result", "score", "label") if key in value), None)
    return value


def _label(labels: Sequence[str], text: str) -> str:
    """The label that a judgement is, else the one that stands last in it; of two at one place the longer."""
    folded = text.casefold().strip(" \t\r\n.\"'`*")
    for label in labels:
        if folded == label.casefold():
            return label
    ends = {
        label: folded.rfind(label.casefold()) + len(label.casefold()) for label in labels if label.casefold() in folded
    }
    if not ends:
        raise GraderFailed(ProblemKind.JUDGE_ANSWER, f"the judgement names none of {', '.join(labels)[:200]}")
    return max(ends, key=lambda label: (ends[label], len(label)))
