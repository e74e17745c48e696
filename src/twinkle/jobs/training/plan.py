"""The plans of kinds ``sft`` and ``dpo``: a course is decided once, then gone through step by step."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel

from twinkle.client.errors import Conflict, OperationFailed
from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.errors import InvalidInput
from twinkle.core.job import JobCancelled, JobEvent, JobFailed, JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work
from twinkle.jobs.training.course import Course, decide
from twinkle.jobs.training.data import TrainingData, open_data
from twinkle.jobs.training.models import base_model_of, shape_of
from twinkle.jobs.training.reckoning import steps_within, work_of
from twinkle.jobs.training.standing import Standing
from twinkle.jobs.training.training import Training
from twinkle.wire.bodies.jobs_training import PreferenceSpec, SupervisedSpec, TrainingSpec

SpecT = TypeVar("SpecT", bound=TrainingSpec)


class TrainingPlan(Generic[SpecT]):
    """What all kinds of trainings do."""

    standing_class: ClassVar[type[Standing]] = Standing

    async def run(self, context: JobContext[SpecT]) -> JsonObject:
        """Train; the result names the checkpoint to sample from, the one to go on from, and the table of metrics."""
        spec = context.spec
        seed = context.job.seed if spec.seed is None else spec.seed
        base_model = await base_model_of(context, spec.model)
        await context.save(phase="preparing the data")
        data = await self._open_data(context, base_model, seed)
        standing = await self._stand(context, data, seed, base_model)
        training = await self._training(context, base_model, data, standing)
        try:
            await context.save(standing.to_json(), phase="training")
            if standing.left is not None:
                await training.begin_again("cancelled before, and taken up again")
            await training.go()
            return await training.finish()
        except JobCancelled as error:
            raise JobCancelled(str(error), result=await training.leave()) from error
        except (OperationFailed, Conflict) as error:
            # What an operation ended in is its outcome for ever, so the same numbers would lead here again.
            await training.begin_again(error.message)
            raise JobFailed("operation_failed", error.message, is_transient=True) from error

    async def _open_data(self, context: JobContext[SpecT], base_model: str, seed: int) -> TrainingData:
        return await open_data(context, base_model, seed=seed)

    async def _training(
        self, context: JobContext[SpecT], base_model: str, data: TrainingData, standing: Standing
    ) -> Training:
        return Training(context, context.spec, base_model, data, standing)

    def _decided(self, spec: SpecT, data: TrainingData, seed: int) -> Course:
        assert isinstance(spec, SupervisedSpec | PreferenceSpec), "others decide themselves"
        return decide(
            spec,
            seed=seed,
            num_rows=len(data.train_numbers),
            num_eval_rows=len(data.held_out_numbers),
            longest_row=data.longest_row,
            whole_batches=spec.loss in BATCH_LOSSES,
            with_reference=isinstance(spec, PreferenceSpec) and spec.needs_reference,
        )

    async def _budget_step(self, spec: SpecT, course: Course, data: TrainingData) -> int | None:
        """The last step within the budget of tokens, if that is known beforehand and not the last one of all."""
        return None

    async def _stand(self, context: JobContext[SpecT], data: TrainingData, seed: int, base_model: str) -> Standing:
        """Where an earlier attempt left it, or the beginning."""
        if context.saved:
            standing = self.standing_class.from_json(context.saved)
            if standing.digests != data.digests:
                raise JobFailed(
                    "data_changed",
                    "the rows are not those that this training began with: its data, the tokenizer or a template"
                    " have changed; submit it anew",
                    field="data",
                )
            return standing
        try:
            course = self._decided(context.spec, data, seed)
        except InvalidInput as error:
            raise JobFailed("invalid_data", error.message, field=error.field) from error
        decided: JsonObject = {
            "base_model": base_model,
            "rows": course.num_rows,
            "eval_rows": course.num_eval_rows,
            "epochs": round(course.num_epochs, 3),
            "steps": course.num_steps,
            "batch_size": course.batch_size,
            "lr": course.lr,
            "seed": seed,
        }
        event = JobEvent(kind="message", message=f"{course.num_steps} steps of {course.batch_size} rows", data=decided)
        standing = self.standing_class(course=course, digests=data.digests)
        standing.budget_step = await self._budget_step(context.spec, course, data)
        await context.save(standing.to_json(), done=0, total=course.num_steps, unit="steps", events=[event], **decided)
        return standing


class RowPlan(TrainingPlan[SpecT]):
    """What kinds do that train on the rows themselves: what they take follows from the course and the rows."""

    async def reckon(self, context: JobContext[SpecT]) -> Work:
        """All that training will have a mesh do; the rows are prepared and kept, and training itself finds them."""
        spec = context.spec
        seed = context.job.seed if spec.seed is None else spec.seed
        base_model = await base_model_of(context, spec.model)
        adapter = await shape_of(context)
        data = await self._open_data(context, base_model, seed)
        try:
            course = self._decided(spec, data, seed)
        except InvalidInput as error:
            raise JobFailed("invalid_data", error.message, field=error.field) from error
        return await work_of(spec, course, data, base_model=base_model, adapter=adapter)

    async def _budget_step(self, spec: SpecT, course: Course, data: TrainingData) -> int | None:
        if spec.max_train_tokens is None:
            return None
        within = await steps_within(course, data, spec.max_train_tokens)
        return within if within < course.num_steps else None


class SupervisedPlan(RowPlan[SupervisedSpec]):
    """``sft``."""

    kind: ClassVar[JobKind] = JobKind.SUPERVISED
    spec_class: ClassVar[type[BaseModel]] = SupervisedSpec


class PreferencePlan(RowPlan[PreferenceSpec]):
    """``dpo``."""

    kind: ClassVar[JobKind] = JobKind.PREFERENCE
    spec_class: ClassVar[type[BaseModel]] = PreferenceSpec
