"""What a training would take, and how far a budget of tokens lets it go: from its course and its rows, to the token."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle.core.job import JobFailed
from twinkle.core.operation import OperationKind
from twinkle.jobs.estimate import AdapterShape, Work
from twinkle.jobs.training.course import Course, cut
from twinkle.jobs.training.data import TrainingData
from twinkle.jobs.training.datums import Amount
from twinkle.wire.bodies.jobs_training import TrainingSpec
from twinkle.wire.paths import SCHEME

_ROWS_AT_ONCE = 512


async def steps_within(course: Course, data: TrainingData, max_tokens: int) -> int:
    """How many steps a budget lets be trained, none of them beyond it.

    Raises:
        JobFailed: Not even the first one.
    """
    whole_epochs, left = 0, max_tokens
    if max_tokens >= data.train.num_tokens and not _is_split(course, data):
        whole_epochs, left = divmod(max_tokens, data.train.num_tokens)
    first = whole_epochs * course.steps_per_epoch + 1
    for step in range(first, course.num_steps + 1):
        num_tokens = await tokens_of(data, course.rows_of(step))
        if num_tokens > left:
            if step == 1:
                raise JobFailed(
                    "budget_too_small",
                    f"the first step alone has {num_tokens} tokens, more than {max_tokens}; raise max_train_tokens, or"
                    " lower batch_size",
                    field="max_train_tokens",
                )
            return step - 1
        left -= num_tokens
    return course.num_steps


async def work_of(
    spec: TrainingSpec, course: Course, data: TrainingData, *, base_model: str, adapter: AdapterShape
) -> Work:
    """All that a training will have a mesh do."""
    num_steps = (
        course.num_steps if spec.max_train_tokens is None else await steps_within(course, data, spec.max_train_tokens)
    )
    looked_at = range(course.num_rows, course.num_rows + course.num_eval_rows)
    num_eval_tokens = await tokens_of(data, looked_at)
    num_looks = sum(course.evaluates_after(step) for step in range(num_steps + 1))
    reference = num_eval_tokens + await _tokens_of_all(course, data) if course.with_reference else 0
    stays = num_kept(spec, course, num_steps)
    times = sum(course.samples_after(step) for step in range(num_steps + 1))
    return Work(
        base_model=base_model,
        num_trained=await tokens_of_steps(course, data, num_steps),
        num_forwarded=num_eval_tokens * num_looks + reference,
        num_drawn=times * sum(prompt.max_tokens for prompt in spec.samples),
        num_steps=num_steps,
        adapter=adapter,
        num_kept_with_optimizer=stays,
        num_kept=stays,
        around=around(spec, course, num_steps, also_opened=0),
        details={
            "rows": course.num_rows,
            "eval_rows": course.num_eval_rows,
            "epochs": round(num_steps / course.steps_per_epoch, 3),
            "batch_size": course.batch_size,
            "stopped_by": "budget" if num_steps < course.num_steps else None,
        },
    )


def around(spec: TrainingSpec, course: Course, num_steps: int, *, also_opened: int) -> dict[OperationKind, int]:
    """A training's operations beside its passes and steps, the final checkpoint's among them.

    Args:
        spec: What is trained.
        course: Its course.
        num_steps: Of the optimizer.
        also_opened: How often weights are opened for sampling that is no course's: for answers that are trained on.
    """
    steps = range(num_steps + 1)
    begins = OperationKind.LOAD_WEIGHTS if spec.model.startswith(SCHEME) else OperationKind.CREATE_MODEL
    num_opened = sum(course.saves_after(step) or course.samples_after(step) for step in steps)
    return {
        begins: 1,
        OperationKind.SAVE_WEIGHTS: 1 + sum(course.saves_after(step) for step in steps),
        OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: 1 + num_opened + also_opened,
    }


def num_kept(spec: TrainingSpec, course: Course, num_steps: int) -> int:
    """How many checkpoints stay, the final one included."""
    num_saved = sum(course.saves_after(step) for step in range(num_steps + 1))
    return min(num_saved, spec.keep_last + (spec.keep_best and course.num_eval_rows > 0)) + 1


async def tokens_of_steps(course: Course, data: TrainingData, num_steps: int) -> int:
    """Of the rows of the first so many steps, each as often as it comes."""
    whole_epochs, rest = divmod(num_steps, course.steps_per_epoch)
    steps = range(whole_epochs * course.steps_per_epoch + 1, whole_epochs * course.steps_per_epoch + rest + 1)
    others = [place for step in steps for place in course.rows_of(step)]
    whole = whole_epochs * await _tokens_of_all(course, data) if whole_epochs else 0
    return whole + await tokens_of(data, others)


async def _tokens_of_all(course: Course, data: TrainingData) -> int:
    """Of the rows that are trained, once each."""
    if not _is_split(course, data):
        return data.train.num_tokens
    return await tokens_of(data, range(course.num_rows))


async def tokens_of(data: TrainingData, places: Iterable[int]) -> int:
    """Of some rows, by their places."""
    pieces = cut(list(places), _ROWS_AT_ONCE)
    return sum([Amount.of(await data.examples(piece)).num_tokens for piece in pieces])


def _is_split(course: Course, data: TrainingData) -> bool:
    """Whether some of the rows are kept from training."""
    return course.num_rows != data.train.num_rows
