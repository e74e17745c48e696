"""A step: what is submitted for it under which numbers, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from twinkle.client.errors import OperationFailed
from twinkle.core.batch_loss import BATCH_LOSSES, CORRECT_TOKENS
from twinkle.core.job import JobFailed
from twinkle.jobs.run import JobRun, Ticket
from twinkle.jobs.training.course import Course, cut
from twinkle.jobs.training.data import Example, TrainingData
from twinkle.jobs.training.datums import (
    Amount,
    Preferences,
    ReferenceOf,
    batch_datums,
    preferences_of,
    reference_of,
    weighted_datums,
)
from twinkle.jobs.training.standing import Tally
from twinkle.wire.bodies.jobs_training import (
    CROSS_ENTROPY,
    PreferenceSpec,
    SupervisedSpec,
    TrainingSpec,
    checkpoint_name,
    wire_config,
)
from twinkle.wire.bodies.training import (
    AdamParams,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from twinkle.wire.training_result import ForwardBackwardResult

LOSS = "loss:sum"
_PASSES_AT_ONCE = 8

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False)
class Passed:
    """One pass over some rows that was submitted."""

    examples: Sequence[Example]
    ticket: Ticket[ForwardBackwardResult]


@dataclass(frozen=True, eq=False, kw_only=True)
class Submitted:
    """A step that is in the journal with all behind it."""

    step: int
    passes: Sequence[Passed]
    optim: Ticket[OptimStepResponse] | None
    looks: Sequence[Passed]
    state: Ticket[SaveWeightsResponse] | None
    weights: Ticket[SaveWeightsForSamplerResponse] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What came of a step. ``figures`` are those of its metrics that follow from the data and the model alone."""

    step: int
    amount: Amount
    figures: dict[str, float]
    eval_figures: dict[str, float] | None
    path: str | None
    """Of the checkpoint behind the step, if there is one."""
    sampler_path: str | None
    """Of the same, or of weights that were saved for the prompts of this step alone."""

    def added_to(self, tally: Tally, *, min_delta: float) -> Tally:
        """What has come of the training with this step."""
        told = replace(
            tally,
            num_tokens=tally.num_tokens + self.amount.num_tokens,
            num_trained=tally.num_trained + self.amount.num_trained,
            train_loss=self.figures.get("loss", tally.train_loss),
        )
        if self.eval_figures is None:
            return told
        told = replace(told, eval_accuracy=self.eval_figures.get("eval_accuracy"))
        return told.evaluated(self.step, self.eval_figures["eval_loss"], min_delta=min_delta)


@dataclass(frozen=True, eq=False, kw_only=True)
class Steps:
    """Submits the steps of one run of a training, and takes their results in."""

    spec: SupervisedSpec | PreferenceSpec
    course: Course
    data: TrainingData
    run: JobRun
    reference: ReferenceOf | None

    async def submit(self, step: int, number: int) -> Submitted:
        """Hand a step over, its first operation under this number; the next one's is ``number + operations_of``."""
        course, numbers = self.course, iter(range(number, number + self.course.operations_of(step)))
        # Those of the reference were the first.
        for _ in range(course.reference_operations if step == 0 else 0):
            next(numbers)
        passes, optim = [], None
        if step:
            passes = await self._train(step, numbers)
            optim = await self.run.optim_step(next(numbers), adam_of(self.spec, course, step))
        looks = await self._look(numbers) if course.evaluates_after(step) else []
        state = weights = None
        if course.saves_after(step):
            state = await self.run.save_weights(next(numbers), checkpoint_name(step))
        if course.saves_after(step) or course.samples_after(step):
            weights = await self.run.save_weights_for_sampler(next(numbers), checkpoint_name(step))
        return Submitted(step=step, passes=passes, optim=optim, looks=looks, state=state, weights=weights)

    async def collect(self, submitted: Submitted) -> Outcome:
        """Wait for all results of a step.

        Raises:
            JobFailed: An operation failed by what the job asked; rows that were in it are named.
            OperationFailed: One failed for a reason of the service's.
        """
        step = submitted.step
        results = [await self._result(step, one.ticket, one.examples) for one in submitted.passes]
        examples = [example for one in submitted.passes for example in one.examples]
        figures = {"loss": sum(result.metrics[LOSS] for result in results)} if step else {}
        if submitted.optim is not None:
            metrics = (await self._result(step, submitted.optim, examples)).metrics or {}
            figures |= {name: metrics[name] for name in ("grad_norm",) if name in metrics}
        figures |= self._preferences([one.examples for one in submitted.passes], results, step=step)
        eval_figures = await self._eval_figures(step, submitted.looks) if submitted.looks else None
        path = sampler_path = None
        if submitted.state is not None:
            path = (await self._result(step, submitted.state)).path
        if submitted.weights is not None:
            sampler_path = (await self._result(step, submitted.weights)).path
        return Outcome(
            step=step,
            amount=Amount.of(examples),
            figures=figures,
            eval_figures=eval_figures,
            path=path,
            sampler_path=sampler_path,
        )

    async def _train(self, step: int, numbers: Iterator[int]) -> list[Passed]:
        examples = await self.data.examples(self.course.rows_of(step))
        weight = Amount.of(examples).weight
        passes = []
        for start in range(0, len(examples), self.course.rows_per_operation):
            own = examples[start : start + self.course.rows_per_operation]
            if self.spec.loss in BATCH_LOSSES:
                datums = batch_datums(own, self.reference)
            else:
                datums = weighted_datums(own, divide_by=weight)
            ticket = await self.run.forward_backward(next(numbers), datums, self.spec.loss, self._loss_config)
            passes.append(Passed(own, ticket))
        return passes

    async def _look(self, numbers: Iterator[int]) -> list[Passed]:
        """Forward passes over what is evaluated on: by the loss itself for pairs, else the likelihood."""
        looks = []
        for places in cut(self._eval_places, self.course.rows_per_look):
            examples = await self.data.examples(places)
            if isinstance(self.spec, PreferenceSpec):
                datums = batch_datums(examples, self.reference)
                ticket = await self.run.forward(next(numbers), datums, self.spec.loss, self._loss_config)
            else:
                config = {"count_correct": 1.0} if self.course.count_correct else None
                data = weighted_datums(examples, divide_by=1.0)
                ticket = await self.run.forward(next(numbers), data, CROSS_ENTROPY, config)
            looks.append(Passed(examples, ticket))
        return looks

    async def _eval_figures(self, step: int, looks: Sequence[Passed]) -> dict[str, float]:
        results = [await self._result(step, one.ticket, one.examples) for one in looks]
        sizes = [self._size(one.examples) for one in looks]
        total = sum(size * result.metrics[LOSS] for size, result in zip(sizes, results, strict=True))
        figures = {"eval_loss": total / (sum(self._weight(one.examples) for one in looks) or 1.0)}
        if all(CORRECT_TOKENS in result.metrics for result in results):
            num_trained = sum(Amount.of(one.examples).num_trained for one in looks)
            figures["eval_accuracy"] = sum(result.metrics[CORRECT_TOKENS] for result in results) / (num_trained or 1)
        told = self._preferences([one.examples for one in looks], results, step=step)
        return figures | {f"eval_{name}": value for name, value in told.items()}

    def _size(self, examples: Sequence[Example]) -> float:
        """What a pass's loss is multiplied with to be a sum: a loss over a batch is a mean over its pairs."""
        return float(len(examples)) if self.spec.pairs else 1.0

    def _weight(self, examples: Sequence[Example]) -> float:
        return float(len(examples)) if self.spec.pairs else Amount.of(examples).weight

    def _preferences(
        self, examples: Sequence[Sequence[Example]], results: Sequence[ForwardBackwardResult], *, step: int
    ) -> dict[str, float]:
        """How often, and how far, the chosen answers are preferred, where the data are pairs."""
        if not self.spec.pairs or not results:
            return {}
        told = Preferences(0, 0, 0.0)
        for own, result in zip(examples, results, strict=True):
            told += preferences_of(own, result.logprobs, self.reference)
        return {"preferred": told.num_right / told.num_pairs, "margin": told.margin / told.num_pairs}

    async def _result(self, step: int, ticket: Ticket[ResultT], examples: Sequence[Example] = ()) -> ResultT:
        return await outcome_of(ticket, f"step {step}", self.data, examples)

    @property
    def _loss_config(self) -> dict[str, float | str]:
        return wire_config(self.spec.loss_config)

    @property
    def _eval_places(self) -> range:
        return range(self.course.num_rows, self.course.num_rows + self.course.num_eval_rows)


def adam_of(spec: TrainingSpec, course: Course, step: int) -> AdamParams:
    """The settings of a step."""
    return AdamParams(
        learning_rate=course.rate(step),
        beta1=spec.beta1,
        beta2=spec.beta2,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        grad_clip_norm=spec.grad_clip_norm,
    )


async def refer(run: JobRun, course: Course, data: TrainingData) -> ReferenceOf:
    """What the model says of all rows before its first step: forward passes, the first operations of a run.

    Asked for again, they are answered by what came of them the first time.
    """
    pieces = cut(range(course.num_rows + course.num_eval_rows), course.rows_per_look)
    reference: ReferenceOf = {}
    for start in range(0, len(pieces), _PASSES_AT_ONCE):
        passes = []
        for index, places in enumerate(pieces[start : start + _PASSES_AT_ONCE], start=start):
            examples = await data.examples(places)
            passes.append(Passed(examples, await run.forward(index + 1, batch_datums(examples), CROSS_ENTROPY)))
        for one in passes:
            result = await outcome_of(one.ticket, "the reference", data, one.examples)
            reference |= reference_of(one.examples, result.logprobs)
    return reference


async def outcome_of(
    ticket: Ticket[ResultT], what: str, data: TrainingData, examples: Sequence[Example] = ()
) -> ResultT:
    """An operation's result.

    Raises:
        JobFailed: It failed by what was asked of it, and would again.
        OperationFailed: It failed for a reason of the service's.
    """
    try:
        return await ticket
    except OperationFailed as error:
        if error.category != "user":
            raise
        rows = f"; in it were {data.tell(examples)}" if examples else ""
        raise JobFailed(
            "operation_failed",
            f"{what}: {error.message}{rows}",
            details={"operation": error.request_id, "rows": [example.number for example in examples]},
        ) from error
