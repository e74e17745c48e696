"""The rows of a training: which are trained, which are evaluated on, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from twinkle.core.job import JobFailed
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataFormat, DataRequest, DataUse, PreparedData, TokenSequence
from twinkle.jobs.tools import Tools
from twinkle.jobs.training.course import split_rows
from twinkle.wire.bodies.jobs_training import TrainingSpec

SpecT = TypeVar("SpecT", bound=TrainingSpec)


@dataclass(frozen=True, eq=False)
class Example:
    """A row in its place: those that are trained come first, those that are evaluated on behind them."""

    place: int
    number: int
    sequences: tuple[TokenSequence, ...]
    item: Mapping[str, Any] | None = None
    """Of a prompt: its row's own fields."""
    line: int | None = None

    def __str__(self) -> str:
        return f"row {self.number}" if self.line is None else f"line {self.line}"


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Both parts of the data, ready to be read by place."""

    tools: Tools
    names: tuple[str, str]
    train: PreparedData
    train_numbers: Sequence[int]
    held_out: PreparedData
    held_out_numbers: Sequence[int]

    @property
    def digests(self) -> tuple[str, ...]:
        """What the rows are known by: equal ones are equal rows."""
        return (self.train.digest, self.held_out.digest)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row; of both answers of a pair."""
        longest = max(self.train.longest, self.held_out.longest)
        return 2 * longest if self.train.use is DataUse.PREFERENCE else longest

    async def examples(self, places: Sequence[int]) -> list[Example]:
        """Rows by their places, in that order."""
        split = len(self.train_numbers)
        found: dict[int, Example] = {}
        for prepared, numbers, first in (
            (self.train, self.train_numbers, 0),
            (self.held_out, self.held_out_numbers, split),
        ):
            own = [place for place in places if (place >= split) == (first > 0)]
            if own:
                rows = await self.tools.read_rows(prepared, [numbers[place - first] for place in own])
                found |= {
                    place: Example(place, row.number, row.sequences, row.item, row.line)
                    for place, row in zip(own, rows, strict=True)
                }
        return [found[place] for place in places]

    def tell(self, examples: Sequence[Example]) -> str:
        """Which rows these are, for a person."""
        split = len(self.train_numbers)
        name = self.names[0 if not examples or examples[0].place < split else 1]
        if all(example.line is not None for example in examples):
            return f"lines {', '.join(str(example.line) for example in examples)} of {name}"
        return f"rows {', '.join(str(example.number) for example in examples)} of {name}, counted from 0"


async def open_data(
    context: JobContext[SpecT], base_model: str, *, seed: int, use: DataUse | None = None
) -> TrainingData:
    """Have all rows looked at and encoded; what was made before is found again.

    Args:
        context: The job's.
        base_model: Whose tokenizer encodes.
        seed: What rows that are kept for an evaluation are drawn by.
        use: What the rows are for; by default pairs, or answers to learn, as the spec says.

    Raises:
        JobFailed: Something is wrong with a row, and nothing was trained.
    """
    spec = context.spec
    use = use or (DataUse.PREFERENCE if spec.pairs else DataUse.SUPERVISED)
    train = await _prepared(context, base_model, spec.data, use, split=spec.split, field="data")
    if spec.eval_data is not None:
        held_out = await _prepared(context, base_model, spec.eval_data, use, split=spec.eval_split, field="eval_data")
        names = (spec.data, spec.eval_data)
        rows, held_out_rows = range(train.num_rows), range(held_out.num_rows)
        return TrainingData(context.tools, names, train, rows, held_out, held_out_rows)
    if spec.eval_fraction and train.num_rows < 2:
        raise JobFailed("invalid_data", "one row cannot be split; leave eval_fraction out", field="eval_fraction")
    numbers, held_out_numbers = split_rows(seed, train.num_rows, spec.eval_fraction)
    return TrainingData(context.tools, (spec.data, spec.data), train, numbers, train, held_out_numbers)


async def _prepared(
    context: JobContext[SpecT], base_model: str, data: str, use: DataUse, *, split: str, field: str
) -> PreparedData:
    spec, is_of_a_hub = context.spec, data.startswith(HUB_SCHEMES)
    request = DataRequest(
        tenant=context.job.tenant,
        model=base_model,
        use=use,
        file=None if is_of_a_hub else data,
        dataset=data if is_of_a_hub else None,
        subset=spec.subset,
        split=split,
        preprocessor=spec.preprocessor,
        format=DataFormat(spec.format),
        template=spec.template,
        system=spec.system,
        enable_thinking=spec.enable_thinking,
        max_length=spec.max_length,
        truncation=spec.truncation,
        max_rows=spec.max_rows,
    )
    try:
        return await context.tools.prepare_data(request)
    except JobFailed as error:
        raise JobFailed(
            error.failure.code,
            error.failure.message,
            is_transient=error.failure.is_transient,
            field=field,
            details=error.failure.details,
        ) from error
