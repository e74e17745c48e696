"""Graders: what says how good an answer is, as data. OpenAI's shapes, and two of our own over the library's rewards.

Texts may hold places to fill in, ``{{sample.output_text}}`` and ``{{item.answer}}``; a formula combines several
graders. Nothing of it is code: a ``python`` grader is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from twinkle.core.errors import InvalidInput
from twinkle.core.formulas import Formula, read_formula
from twinkle.core.placeholders import MAX_TEMPLATE_CHARACTERS, Placeholders, read_placeholders
from twinkle.wire.bodies.base import MAX_INT32, MAX_INT64, Identifier, ResponseBody, Text
from twinkle.wire.bodies.jobs_base import JobPart

ROOTS = frozenset({"sample", "item"})
"""What a place to fill in begins with: the answer that is judged, and the row it answers."""
OUTPUT_TEXT = "{{sample.output_text}}"
MAX_GRADERS = 20
MAX_MESSAGES = 50
MAX_PARTS = 20
MAX_LABELS = 100
MAX_PATTERN_CHARACTERS = 1000
DEFAULT_JUDGE_TOKENS = 512

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SAMPLE_PATHS = frozenset({"output_text", "output_json"})


def places_in(text: str) -> Placeholders:
    """A grader's text as it was judged, read."""
    return read_placeholders(text, field="text", roots=ROOTS)


def _judged_places(text: str) -> str:
    try:
        places = places_in(text).places
    except InvalidInput as error:
        raise ValueError(error.message.removeprefix(f"{error.field}: ")) from error
    for place in places:
        if place.root == "sample" and (not place.steps or place.steps[0] not in _SAMPLE_PATHS):
            raise ValueError(f"asks for {place.path!r}; of a sample there are output_text and output_json")
        if place.root == "item" and not place.steps:
            raise ValueError("asks for 'item' as a whole; name a field of it, like item.answer")
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return text


FilledText = Annotated[str, Field(max_length=MAX_TEMPLATE_CHARACTERS), AfterValidator(_judged_places)]
"""A text with places to fill in."""
Label = Annotated[str, Field(min_length=1, max_length=200)]


class GraderPart(JobPart):
    """Base of every grader."""

    name: Identifier


class StringCheckGrader(GraderPart):
    """1 if two texts are in a relation, else 0: equal, not equal, or ``input`` holds ``reference``."""

    type: Literal["string_check"]
    input: FilledText
    reference: FilledText
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarityGrader(GraderPart):
    """How alike two texts are, from 0 to 1; the formulas are in :mod:`twinkle.grading.similarity`."""

    type: Literal["text_similarity"]
    input: FilledText
    reference: FilledText
    evaluation_metric: Literal[
        "cosine",
        "fuzzy_match",
        "bleu",
        "gleu",
        "meteor",
        "rouge_1",
        "rouge_2",
        "rouge_3",
        "rouge_4",
        "rouge_5",
        "rouge_l",
    ]


class JudgeText(JobPart):
    """A part of a message to a model that judges."""

    type: Literal["input_text", "output_text"]
    text: FilledText


def _text_parts(value: object) -> object:
    """Brings OpenAI's forms to one: a list of texts."""
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in ("input_text", "output_text"):
            raise ValueError(f"holds a part of type {kind[:40]!r}; a model that judges is given texts only")
    return [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]


JudgeContent: TypeAlias = Annotated[
    list[JudgeText],
    BeforeValidator(_text_parts, json_schema_input_type=str | JudgeText | list[str | JudgeText]),
    Field(max_length=MAX_PARTS),
]


class JudgeMessage(JobPart):
    """A message to a model that judges."""

    role: Literal["user", "assistant", "system", "developer"]
    content: JudgeContent
    type: Literal["message"] = "message"

    def texts(self) -> Iterator[str]:
        """Its parts' texts, with their places."""
        yield from (part.text for part in self.content)


class JudgeSampling(JobPart):
    """How a model that judges is sampled; by default always its likeliest answer."""

    max_completions_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None


class ModelGraderPart(GraderPart):
    """Base of the graders that ask a model that is served here."""

    model: Text = Field(description="a base model that is served, or a tinker:// checkpoint")
    input: list[JudgeMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    sampling_params: JudgeSampling | None = None


class ScoreModelGrader(ModelGraderPart):
    """The number that a model answers with."""

    type: Literal["score_model"]
    range: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(default=[0.0, 1.0], min_length=2, max_length=2)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: must be two numbers, the smaller one first, not {self.range}")
        return self


class LabelModelGrader(ModelGraderPart):
    """1 if the label that a model answers with is one that passes, else 0."""

    type: Literal["label_model"]
    labels: list[Label] = Field(min_length=2, max_length=MAX_LABELS)
    passing_labels: list[Label] = Field(min_length=1, max_length=MAX_LABELS)

    @model_validator(mode="after")
    def _known_labels(self) -> Self:
        if unknown := sorted(set(self.passing_labels) - set(self.labels)):
            raise ValueError(f"passing_labels: {unknown[0]!r} is none of the labels")
        return self


RewardName: TypeAlias = Literal[
    "arithmetic",
    "gsm8k",
    "gsm8k_format",
    "math",
    "format",
    "multimodal",
    "olympiad",
    "olympiad_format",
    "olympiad_quality",
]


class RewardGrader(GraderPart):
    """A reward of the library (``twinkle.reward``) by its name; computed in a process of its own."""

    type: Literal["reward"]
    reward: RewardName
    input: FilledText = OUTPUT_TEXT
    reference: FilledText | None = Field(default=None, description="the truth, for the rewards that compare with one")

    @model_validator(mode="after")
    def _truth_where_needed(self) -> Self:
        needs_truth = self.reward not in FORMAT_REWARDS
        if needs_truth and self.reference is None:
            raise ValueError(
                f"reference: is missing; {self.reward!r} compares with a truth, like '{{{{item.answer}}}}'"
            )
        return self


FORMAT_REWARDS = frozenset({"gsm8k_format", "format", "olympiad_format", "olympiad_quality"})
"""Those that look at the answer alone."""


class RegexpGrader(GraderPart):
    """1 if a pattern is found (and what its group holds equals ``reference``, if there is one), else 0.

    The pattern is Python's. The search runs in a process of its own, which is ended when it takes too long.
    """

    type: Literal["regexp"]
    pattern: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS), AfterValidator(_pattern)]
    input: FilledText = OUTPUT_TEXT
    reference: FilledText | None = None
    group: Annotated[int, Field(ge=0, le=99)] = 0
    ignore_case: bool = False

    @model_validator(mode="after")
    def _known_group(self) -> Self:
        if self.group > (num_groups := re.compile(self.pattern).groups):
            raise ValueError(f"group: is {self.group}; the pattern has {num_groups}")
        return self


def _refuse_code(value: object) -> object:
    if isinstance(value, Mapping) and value.get("type") == "python":
        raise ValueError(
            "is a python grader; graders are data here, never code: use regexp, reward, text_similarity or a"
            " model that judges, combined by multi"
        )
    return value


PlainGrader: TypeAlias = (
    StringCheckGrader | TextSimilarityGrader | ScoreModelGrader | LabelModelGrader | RewardGrader | RegexpGrader
)
"""One that is made of no others."""
_AnyPlain = Annotated[Annotated[PlainGrader, Field(discriminator="type")], BeforeValidator(_refuse_code)]


def _by_name(value: object) -> object:
    """OpenAI's documents write the parts by name, its client's types one part alone; a list is read by the names."""
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        value = [value]
    if not isinstance(value, list):
        return value
    named: dict[Any, object] = {}
    for part in value:
        name = part.get("name") if isinstance(part, Mapping) else None
        if not isinstance(name, str) or name in named:
            raise ValueError("must each have a name of its own")
        named[name] = part
    return named


class MultiGrader(GraderPart):
    """Several graders, and a formula over their names that makes one number of theirs."""

    type: Literal["multi"]
    graders: Annotated[
        dict[str, _AnyPlain],
        BeforeValidator(_by_name, json_schema_input_type=dict[str, _AnyPlain] | list[_AnyPlain] | _AnyPlain),
    ] = Field(min_length=1, max_length=MAX_GRADERS)
    calculate_output: Text

    @model_validator(mode="after")
    def _readable(self) -> Self:
        for name in self.graders:
            if not _NAME.fullmatch(name):
                raise ValueError(f"graders: {name!r} cannot stand in a formula; use letters, digits and _")
        try:
            self.formula()
        except InvalidInput as error:
            raise ValueError(f"calculate_output: {error.message.removeprefix('calculate_output: ')}") from error
        return self

    def formula(self) -> Formula:
        """What makes one number of the parts'."""
        return read_formula(self.calculate_output, field="calculate_output", names=self.graders)


Grader: TypeAlias = Annotated[
    Annotated[
        StringCheckGrader
        | TextSimilarityGrader
        | ScoreModelGrader
        | LabelModelGrader
        | RewardGrader
        | RegexpGrader
        | MultiGrader,
        Field(discriminator="type"),
    ],
    BeforeValidator(_refuse_code),
]


def parts_of(grader: Grader) -> Mapping[str, PlainGrader]:
    """The graders that a grader is made of by name; itself, if it is one."""
    return grader.graders if isinstance(grader, MultiGrader) else {grader.name: grader}


def texts_of(grader: PlainGrader) -> Iterator[str]:
    """The texts with places of one grader."""
    if isinstance(grader, ModelGraderPart):
        for message in grader.input:
            yield from message.texts()
        return
    yield grader.input
    if grader.reference is not None:
        yield grader.reference


def item_fields(grader: Grader) -> frozenset[str]:
    """The fields that a row must have to be graded."""
    return frozenset(
        place.steps[0]
        for part in parts_of(grader).values()
        for text in texts_of(part)
        for place in places_in(text).places
        if place.root == "item"
    )


class GraderRunRequest(JobPart):
    """``POST fine_tuning/alpha/graders/run``: one answer, judged now."""

    grader: Grader
    model_sample: Annotated[str, Field(max_length=1_000_000)]
    item: dict[str, Any] | None = None


class GraderValidateRequest(JobPart):
    """``POST fine_tuning/alpha/graders/validate``."""

    grader: Grader


class GraderValidateResponse(ResponseBody):
    """The grader as it was read."""

    grader: dict[str, Any]


class GraderErrors(ResponseBody):
    """What went wrong, by OpenAI's names; what does not exist here is never so."""

    formula_parse_error: bool = False
    invalid_variable_error: bool = False
    model_grader_parse_error: bool = False
    model_grader_refusal_error: bool = False
    model_grader_server_error: bool = False
    model_grader_server_error_details: str | None = None
    other_error: bool = False
    python_grader_runtime_error: bool = False
    python_grader_runtime_error_details: str | None = None
    python_grader_server_error: bool = False
    python_grader_server_error_type: str | None = None
    sample_parse_error: bool = False
    truncated_observation_error: bool = False
    unresponsive_reward_error: bool = False


class GraderRunMetadata(ResponseBody):
    """How a score came about."""

    errors: GraderErrors
    execution_time: float
    name: str
    sampled_model_name: str | None = None
    scores: dict[str, float]
    token_usage: int | None = None
    type: str


class GraderRunResponse(ResponseBody):
    """What an answer is worth."""

    metadata: GraderRunMetadata
    model_grader_token_usage_per_model: dict[str, int]
    reward: float
    sub_rewards: dict[str, float]
