"""The course of a training, before anything of it has run: a pure function of its spec and the number of its rows.

Whoever takes a job up computes the same course, and so submits the same rows under the same numbers. Of the data it
needs their number and the longest row alone.

A run's operations are numbered from 1. First come, where a loss needs them, the passes of the reference; then the
looks at what has not been trained yet; then, step by step, the step's passes, its ``optim_step``, and whatever is
looked at and saved behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_training import DEFAULT_LR, Schedule, TrainingSpec

OPERATION_TOKENS = 32 * 1024
"""About how many tokens an operation brings: losses of single rows are cut into several, those of a batch never are."""
MAX_BATCH_TOKENS = 1 << 20

_MOST_METRICS = 4000
_AUTO_STEPS = 100
_AUTO_MAX_EPOCHS = 10
_AUTO_MAX_BATCH = 64
_AUTO_BATCH_SHARE = 0.01
_PASSES_OF_A_STEP_END = 1
_OPERATIONS_OF_A_CHECKPOINT = 2


@dataclass(frozen=True, kw_only=True)
class Course:
    """What was decided when the data were known; stored with the job, so that a newer version goes on by it.

    ``num_rows`` counts pairs where the data are pairs, and so do ``batch_size`` and all that follows from it.
    """

    num_rows: int
    num_eval_rows: int
    batch_size: int
    num_steps: int
    rows_per_operation: int
    lr: float
    schedule: Schedule
    warmup_steps: int
    final_lr_ratio: float
    eval_every: int
    sample_every: int
    checkpoint_every: int
    rows_per_look: int
    with_reference: bool
    samples: bool
    metrics_every: int
    seed: int
    count_correct: bool = False
    """Whether evaluations tell how many tokens were right; those that an older version decided on do not."""

    @property
    def reference_operations(self) -> int:
        """Passes of the reference, over all rows."""
        return math.ceil((self.num_rows + self.num_eval_rows) / self.rows_per_look) if self.with_reference else 0

    @property
    def eval_operations(self) -> int:
        """Passes of one evaluation."""
        return math.ceil(self.num_eval_rows / self.rows_per_look)

    @property
    def steps_per_epoch(self) -> int:
        """Of which the last may have fewer rows."""
        return math.ceil(self.num_rows / self.batch_size)

    @property
    def num_epochs(self) -> float:
        """How often every row is seen."""
        return self.num_steps / self.steps_per_epoch

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        return self.lr * _share(self, step)

    def evaluates_after(self, step: int) -> bool:
        """Whether there is an evaluation behind a step; 0 is before the first."""
        return self.num_eval_rows > 0 and _is_due(step, self.eval_every, self.num_steps)

    def samples_after(self, step: int) -> bool:
        """Whether the prompts are answered behind a step."""
        return self.samples and _is_due(step, self.sample_every, self.num_steps)

    def tells(self, step: int) -> bool:
        """Whether a step's metrics are kept: all of them, unless there are very many steps."""
        return _is_due(step, self.metrics_every, self.num_steps) or self.evaluates_after(step)

    def saves_after(self, step: int) -> bool:
        """Whether there is a checkpoint behind a step; the last one's is called otherwise and comes by itself."""
        return 0 < step < self.num_steps and step % self.checkpoint_every == 0

    def operations_of(self, step: int) -> int:
        """How many operations a step has, all behind it included; 0 is what comes before the first."""
        weights = self.samples_after(step) and not self.saves_after(step)
        return (
            (self.reference_operations if step == 0 else self.passes_of(step) + _PASSES_OF_A_STEP_END)
            + (self.eval_operations if self.evaluates_after(step) else 0)
            + (_OPERATIONS_OF_A_CHECKPOINT if self.saves_after(step) else 0)
            + (1 if weights else 0)
        )

    def passes_of(self, step: int) -> int:
        """How many operations a step's rows are brought in."""
        return math.ceil(self._size_of(step) / self.rows_per_operation)

    def first_numbers(self, from_step: int = 0) -> list[int]:
        """The number of each step's first operation in a run that begins behind ``from_step``; then the next free one.

        The entry for a step is at ``step - from_step``; a run from the beginning has the entry for step 0.
        """
        first = from_step if from_step == 0 else from_step + 1
        numbers = [1] if from_step == 0 else [0, 1]
        for step in range(first, self.num_steps + 1):
            numbers.append(numbers[-1] + self.operations_of(step))
        return numbers

    def rows_of(self, step: int) -> list[int]:
        """The rows of a step, by their place among those that are trained."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        start = position * self.batch_size
        return [int(row) for row in order_of(self.seed, epoch, self.num_rows)[start : start + self.batch_size]]

    def epoch_of(self, step: int) -> int:
        """Which pass over the data a step belongs to, from 0."""
        return (step - 1) // self.steps_per_epoch

    def _size_of(self, step: int) -> int:
        is_last = step % self.steps_per_epoch == 0
        return self.num_rows - (self.steps_per_epoch - 1) * self.batch_size if is_last else self.batch_size


def decide(
    spec: TrainingSpec,
    *,
    seed: int,
    num_rows: int,
    num_eval_rows: int,
    longest_row: int,
    whole_batches: bool,
    with_reference: bool,
) -> Course:
    """The course of a training on so many rows.

    Args:
        spec: What was asked for.
        seed: What the order of the rows is drawn from.
        num_rows: Rows that are trained; pairs count once.
        num_eval_rows: Rows that are evaluated on.
        longest_row: Tokens of the longest one; of both answers of a pair.
        whole_batches: Whether a step's rows must be in one operation.
        with_reference: Whether every row goes through the model before the first step.

    Raises:
        InvalidInput: A batch is too large for one operation, or there is nothing to train on.
    """
    if num_rows < 1:
        raise InvalidInput("data", "has no rows to train on")
    epochs = _auto_epochs(num_rows) if spec.epochs == "auto" else spec.epochs
    batch_size = min(_auto_batch(num_rows) if spec.batch_size == "auto" else spec.batch_size, num_rows)
    per_epoch = math.ceil(num_rows / batch_size)
    if whole_batches and batch_size * longest_row > MAX_BATCH_TOKENS:
        raise InvalidInput(
            "batch_size",
            f"{batch_size} rows of up to {longest_row} tokens are more than the {MAX_BATCH_TOKENS} tokens that a loss"
            " over the whole batch takes at once; lower batch_size or max_length",
        )
    num_steps = spec.steps or epochs * per_epoch
    at_once = batch_size if whole_batches else max(1, min(batch_size, OPERATION_TOKENS // max(longest_row, 1)))
    warmup = round(spec.warmup_ratio * num_steps) if spec.warmup_steps is None else spec.warmup_steps
    return Course(
        num_rows=num_rows,
        num_eval_rows=num_eval_rows,
        batch_size=batch_size,
        num_steps=num_steps,
        rows_per_operation=at_once,
        lr=DEFAULT_LR if spec.lr == "auto" else spec.lr,
        schedule=spec.schedule,
        warmup_steps=warmup,
        final_lr_ratio=spec.final_lr_ratio,
        eval_every=spec.eval_every or per_epoch,
        sample_every=spec.sample_every or per_epoch,
        checkpoint_every=spec.checkpoint_every or per_epoch,
        rows_per_look=max(1, OPERATION_TOKENS // max(longest_row, 1)),
        with_reference=with_reference,
        samples=bool(spec.samples),
        metrics_every=math.ceil(num_steps / _MOST_METRICS),
        seed=seed,
        count_correct=True,
    )


@lru_cache(maxsize=4)
def order_of(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The rows of an epoch in the order they are trained in: a pure function, the same in every version of numpy.

    Of numpy only the generator's bits are promised for ever, so they are what rows are sorted by.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


def split_rows(seed: int, num_rows: int, fraction: float) -> tuple[list[int], list[int]]:
    """The rows that are trained and those that are evaluated on, each in the order of the data."""
    if not fraction:
        return list(range(num_rows)), []
    num_eval = min(max(1, round(num_rows * fraction)), num_rows - 1)
    drawn = {int(row) for row in order_of(seed, -1 & 0xFFFFFFFF, num_rows)[:num_eval]}
    return [row for row in range(num_rows) if row not in drawn], sorted(drawn)


def cut(rows: Sequence[int], size: int) -> list[list[int]]:
    """Rows in pieces of one size, the last perhaps smaller."""
    return [list(rows[start : start + size]) for start in range(0, len(rows), size)]


def _is_due(step: int, every: int, num_steps: int) -> bool:
    return step % every == 0 or step == num_steps


def _share(course: Course, step: int) -> float:
    warmup = min(course.warmup_steps, course.num_steps)
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - 1 - warmup) / max(course.num_steps - warmup, 1)
    match course.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - course.final_lr_ratio) * done
        case "cosine":
            return course.final_lr_ratio + (1.0 - course.final_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
        case "inverse_sqrt":
            return math.sqrt((warmup + 1) / step)


def _auto_epochs(num_rows: int) -> int:
    """About a hundred steps' worth for few rows, once for many."""
    steps = math.ceil(num_rows / _auto_batch(num_rows))
    return max(1, min(_AUTO_MAX_EPOCHS, math.ceil(_AUTO_STEPS / steps)))


def _auto_batch(num_rows: int) -> int:
    return max(1, min(_AUTO_MAX_BATCH, round(num_rows * _AUTO_BATCH_SHARE)))
