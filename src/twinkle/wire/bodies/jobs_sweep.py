"""What a sweep is asked for: one template, the parameters to vary, how many of its members run at once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinkle.wire.bodies.base import MAX_INT32, Identifier
from twinkle.wire.bodies.jobs_base import JobPart, JobSpec

MAX_MEMBERS = 1000
MAX_PARAMETERS = 16

Value = bool | int | float | str
"""What one parameter of one member may be."""
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class SweepMode(StrEnum):
    """How members are made of the parameters."""

    GRID = "grid"
    """Every combination."""
    RANDOM = "random"
    """So many of them, drawn by the seed."""


class Goal(StrEnum):
    """Which end of the metric is the good one."""

    MIN = "min"
    MAX = "max"


class Requirement(StrEnum):
    """When a sweep has succeeded."""

    ANY = "any"
    """At least one member has: the others are in the table with their reasons."""
    ALL = "all"


class ParameterRange(JobPart):
    """Numbers from ``low`` to ``high``, both included: evenly spread, evenly in their logarithm, or whole ones."""

    scale: Literal["log", "lin", "int"]
    low: FiniteFloat
    high: FiniteFloat
    count: int | None = Field(default=None, ge=1, le=MAX_MEMBERS)
    """How many values a grid takes; a random sweep draws from the whole range."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ParameterRange:
        if not self.low < self.high:
            raise ValueError(f"high must be above low, and {self.high:g} is not above {self.low:g}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low must be above 0 on a logarithmic scale, not {self.low:g}")
        if self.scale == "int" and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low and high must be whole numbers for int, not {self.low:g} and {self.high:g}")
        return self


class SweepTemplate(JobPart):
    """The job that every member is, but for the parameters."""

    kind: Identifier
    spec: dict[str, Any]


class SweepSpec(JobSpec):
    """Kind ``sweep``: a template and its parameters, expanded into member jobs when it is submitted."""

    template: SweepTemplate
    parameters: Annotated[
        dict[Identifier, Annotated[list[Value], Field(min_length=1, max_length=MAX_MEMBERS)] | ParameterRange],
        Field(min_length=1, max_length=MAX_PARAMETERS),
    ]
    """By the fields of the template's spec they stand for: a path like ``lora.rank``, or its last part alone."""
    mode: Annotated[SweepMode, Field(strict=False)] = SweepMode.GRID
    runs: int | None = Field(default=None, ge=1, le=MAX_MEMBERS)
    seed: int = Field(default=0, ge=0, le=MAX_INT32)
    at_once: int | None = Field(default=None, ge=1, le=MAX_MEMBERS)
    """How many members may run at the same time; by default only the tenant's own limit holds them."""
    metric: Identifier | None = None
    """The number of a member's result that tells which is best, like ``eval_loss``; by default its kind's own."""
    goal: Annotated[Goal, Field(strict=False)] | None = None
    """Which end of it is good; by default the lower one of a loss, the higher one of a reward."""
    require: Annotated[Requirement, Field(strict=False)] = Requirement.ANY

    @model_validator(mode="after")
    def _says_how_many(self) -> SweepSpec:
        if self.mode is SweepMode.RANDOM and self.runs is None:
            raise ValueError("runs is missing: a random sweep needs to know how many members to draw")
        if self.mode is SweepMode.GRID and self.runs is not None:
            raise ValueError('runs is for "mode": "random"; a grid has as many members as there are combinations')
        return self
