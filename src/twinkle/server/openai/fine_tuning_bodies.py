"""What clients send to OpenAI's fine-tuning routes, and the specs of jobs that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from twinkle.core.errors import InvalidInput
from twinkle.core.job import JobKind, JsonObject
from twinkle.wire.bodies.base import MAX_INT32, Identifier, RequestBody
from twinkle.wire.bodies.graders import Grader
from twinkle.wire.bodies.jobs_rl import DEFAULT_GROUP, MAX_GROUP
from twinkle.wire.bodies.jobs_training import DEFAULT_LR, MAX_SUFFIX_CHARS
from twinkle.wire.bodies.openai import Off

MAX_METADATA_KEYS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Auto: TypeAlias = Literal["auto"]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT32)] | Auto
Factor: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto
OpenAIMetadata = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=MAX_METADATA_KEYS),
]


class Hyperparameters(RequestBody):
    """Of both methods; ``auto`` is decided when the data are known."""

    n_epochs: Count | None = None
    batch_size: Count | None = None
    learning_rate_multiplier: Factor | None = None


class PreferenceHyperparameters(Hyperparameters):
    """With how much the distance to the reference counts."""

    beta: Factor | None = None


class SupervisedMethod(RequestBody):
    """Learn the answers."""

    hyperparameters: Hyperparameters | None = None


class PreferenceMethod(RequestBody):
    """Prefer one answer to another."""

    hyperparameters: PreferenceHyperparameters | None = None


class ReinforcementHyperparameters(Hyperparameters):
    """With how much is sampled. What this server's models have no setting for is refused."""

    compute_multiplier: Factor | None = None
    """Of the number of answers to each prompt."""
    eval_interval: Count | None = None
    eval_samples: Count | None = None
    reasoning_effort: Literal["default"] | None = None


class ReinforcementMethod(RequestBody):
    """Learn what a grader rewards."""

    grader: Grader
    hyperparameters: ReinforcementHyperparameters | None = None


class Method(RequestBody):
    """How it is trained; what belongs to the other methods must not be there."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: SupervisedMethod | None = None
    dpo: PreferenceMethod | None = None
    reinforcement: ReinforcementMethod | None = None

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        for name in ("supervised", "dpo", "reinforcement"):
            if name != self.type and getattr(self, name) is not None:
                raise ValueError(f"has settings for {name}, but its type is {self.type}")
        if self.type == "reinforcement" and self.reinforcement is None:
            raise ValueError("needs reinforcement.grader, which says how good an answer is")
        return self


class FineTuningRequest(RequestBody):
    """``POST /v1/fine_tuning/jobs``."""

    model: Identifier
    training_file: Identifier
    validation_file: Identifier | None = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None
    """The older place for those of the supervised method."""
    suffix: Annotated[str, Field(min_length=1, max_length=MAX_SUFFIX_CHARS, pattern=r"^[A-Za-z0-9._-]+$")] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    metadata: OpenAIMetadata | None = None
    integrations: Off = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.method is not None and self.hyperparameters is not None:
            raise ValueError("hyperparameters belong into method, where there is one")
        return self

    @property
    def method_name(self) -> str:
        """Which method it asks for."""
        return "supervised" if self.method is None else self.method.type


Translation: TypeAlias = Callable[[FineTuningRequest], JsonObject]
"""Makes the spec of a job, all but what the methods share."""

FIELDS: Mapping[str, str] = {"data": "training_file", "eval_data": "validation_file"}
"""What OpenAI calls the fields of a spec."""


def translate(body: FineTuningRequest, *, model: str) -> tuple[JobKind, JsonObject]:
    """The kind and the spec of the job that a request asks for.

    Args:
        body: The request.
        model: What its model's name stands for: a base model, or a checkpoint's path.

    Raises:
        InvalidInput: The method is not offered.
    """
    if body.method_name not in METHODS:
        raise InvalidInput("method.type", f"{body.method_name!r} is none of {', '.join(METHODS)}")
    kind, translation = METHODS[body.method_name]
    shared = {
        "model": model,
        "data": body.training_file,
        "eval_data": body.validation_file,
        "suffix": body.suffix,
        "seed": body.seed,
    }
    values = {**shared, **translation(body)}
    return kind, {name: value for name, value in values.items() if value is not None}


def _supervised(body: FineTuningRequest) -> JsonObject:
    method = None if body.method is None else body.method.supervised
    return _trained(body.hyperparameters if method is None else method.hyperparameters)


def _preference(body: FineTuningRequest) -> JsonObject:
    method = None if body.method is None else body.method.dpo
    given = None if method is None else method.hyperparameters
    beta = None if given is None or given.beta == "auto" else given.beta
    return {**_trained(given), "loss_config": None if beta is None else {"beta": beta}}


def _reinforcement(body: FineTuningRequest) -> JsonObject:
    assert body.method is not None and body.method.reinforcement is not None, "it was judged when it was read"
    method = body.method.reinforcement
    given = method.hyperparameters or ReinforcementHyperparameters()
    factor = given.compute_multiplier
    asked: JsonObject = {
        **_trained(given),
        "grader": method.grader.model_dump(mode="json", exclude_none=True),
        "group_size": _group_of(factor) if isinstance(factor, float) else None,
        "eval_every": given.eval_interval,
        "eval_answers": given.eval_samples,
    }
    return {name: value for name, value in asked.items() if value != "auto"}


def _group_of(factor: float) -> int:
    return min(max(round(factor * DEFAULT_GROUP), 2), MAX_GROUP)


def _trained(given: Hyperparameters | None) -> JsonObject:
    """The settings that both methods have; what is left out is the job's own default, which is ``auto``."""
    if given is None:
        return {}
    factor = given.learning_rate_multiplier
    return {
        "epochs": given.n_epochs,
        "batch_size": given.batch_size,
        "lr": factor if factor is None or factor == "auto" else factor * DEFAULT_LR,
    }


METHODS: dict[str, tuple[JobKind, Translation]] = {
    "supervised": (JobKind.SUPERVISED, _supervised),
    "dpo": (JobKind.PREFERENCE, _preference),
    "reinforcement": (JobKind.REINFORCEMENT, _reinforcement),
}
"""By the method's name."""
