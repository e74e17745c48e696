"""The plans of kinds ``grpo`` and ``distill``: a training whose steps make their own data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from twinkle.core.errors import InvalidInput
from twinkle.core.job import JobFailed, JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataUse
from twinkle.jobs.estimate import Work
from twinkle.jobs.reinforcement.course import PolicyCourse, PolicyStanding, decide_policy
from twinkle.jobs.reinforcement.judging import Jury, missing_fields
from twinkle.jobs.reinforcement.rating import GraderRater, Rater, TeacherRater
from twinkle.jobs.reinforcement.reckoning import Questions, work_of_policy, work_of_teaching
from twinkle.jobs.reinforcement.sampling import Reference, Source
from twinkle.jobs.reinforcement.steps import PolicyOutcome, PolicySteps
from twinkle.jobs.reinforcement.teaching import SupervisedByTeacher, open_prompts
from twinkle.jobs.run import JobRun
from twinkle.jobs.training.data import TrainingData, open_data
from twinkle.jobs.training.models import base_model_of, shape_of
from twinkle.jobs.training.plan import TrainingPlan
from twinkle.jobs.training.standing import Kept, Standing
from twinkle.jobs.training.steps import Outcome
from twinkle.jobs.training.training import StepsOfRun, Training
from twinkle.wire.bodies.graders import ModelGraderPart, parts_of
from twinkle.wire.bodies.jobs_rl import DistillSpec, ReinforcementSpec, RolloutSpec

_ROWS_AT_ONCE = 1000

SpecT = TypeVar("SpecT", bound=RolloutSpec)


class PolicyTraining(Training):
    """One attempt at learning from answers: a step begins when the one before it has been taken in."""

    def __init__(
        self,
        context: JobContext[Any],
        base_model: str,
        data: TrainingData,
        standing: PolicyStanding,
        *,
        source: Source,
        rater: Rater,
        loss: str,
        loss_config: dict[str, float | int | bool | str],
    ) -> None:
        super().__init__(context, source.spec, base_model, data, standing)
        self._policy_standing = standing
        self._source = source
        self._rater = rater
        self._loss = loss
        self._loss_config = loss_config

    async def _open_steps(self, run: JobRun) -> StepsOfRun:
        return PolicySteps(
            source=self._source,
            loss=self._loss,
            loss_config=self._loss_config,
            run=run,
            standing=self._policy_standing,
            rater=self._rater,
        )

    def _must_look(self, submitted: deque[Any]) -> bool:
        return bool(submitted)

    async def _take_in(self, outcome: Outcome) -> None:
        assert isinstance(outcome, PolicyOutcome), "its own steps gave it"
        self._events += outcome.events
        figures = {**outcome.figures, **(outcome.eval_figures or {})}
        told: dict[str, float] = {name: figures[name] for name in ("reward", "eval_reward") if name in figures}
        self._policy_standing.rewards = {**self._policy_standing.rewards, **told}
        await super()._take_in(outcome)
        if self._events:
            # The next step's grades are saved in its middle: no step may count by then that was not told.
            await self._save()

    def _result(self, kept: Kept) -> JsonObject:
        result, rewards = super()._result(kept), self._policy_standing.rewards
        if "eval_reward" in rewards and result["best_eval_loss"] is not None:
            rewards = {**rewards, "best_eval_reward": -result["best_eval_loss"]}
        return {**result, **rewards}


class PolicyPlan(TrainingPlan[SpecT], ABC):
    """What both kinds do."""

    standing_class: ClassVar[type[Standing]] = PolicyStanding

    @abstractmethod
    async def _rater(self, context: JobContext[SpecT], source: Source, standing: PolicyStanding) -> Rater:
        """What says what is to be learnt."""

    @abstractmethod
    def _loss(self, spec: SpecT) -> tuple[str, dict[str, float | int | bool | str], int]:
        """The loss, its settings, and how many answers each prompt gets."""

    async def _open_data(self, context: JobContext[SpecT], base_model: str, seed: int) -> TrainingData:
        return await open_data(context, base_model, seed=seed, use=DataUse.PROMPTS)

    async def reckon(self, context: JobContext[SpecT]) -> Work:
        """All that it would have meshes do; prompts are counted, answers by how long they may get."""
        spec = context.spec
        base_model = await base_model_of(context, spec.model)
        adapter = await shape_of(context)
        data = await self._open_data(context, base_model, self._seed(context))
        try:
            course = self._decided(spec, data, self._seed(context))
        except InvalidInput as error:
            raise JobFailed("invalid_data", error.message, field=error.field) from error
        return await work_of_policy(
            spec,
            course,
            data,
            base_model=base_model,
            adapter=adapter,
            eval_answers=spec.eval_answers if isinstance(spec, ReinforcementSpec) else 1,
            questions=await self._questions(context, base_model),
        )

    @abstractmethod
    async def _questions(self, context: JobContext[SpecT], base_model: str) -> Questions | None:
        """Who is asked about the answers."""

    def _seed(self, context: JobContext[SpecT]) -> int:
        return context.job.seed if context.spec.seed is None else context.spec.seed

    def _decided(self, spec: SpecT, data: TrainingData, seed: int) -> PolicyCourse:
        loss, _, group_size = self._loss(spec)
        return decide_policy(
            spec,
            seed=seed,
            num_rows=len(data.train_numbers),
            num_eval_rows=len(data.held_out_numbers),
            longest_prompt=data.longest_row,
            group_size=group_size,
            loss=loss,
        )

    async def _training(
        self, context: JobContext[SpecT], base_model: str, data: TrainingData, standing: Standing
    ) -> Training:
        assert isinstance(standing, PolicyStanding) and isinstance(standing.course, PolicyCourse)
        source = Source(context=context, spec=context.spec, course=standing.course, data=data, base_model=base_model)
        loss, loss_config, _ = self._loss(context.spec)
        return PolicyTraining(
            context,
            base_model,
            data,
            standing,
            source=source,
            rater=await self._rater(context, source, standing),
            loss=loss,
            loss_config=loss_config,
        )


class ReinforcementPlan(PolicyPlan[ReinforcementSpec]):
    """``grpo``."""

    kind: ClassVar[JobKind] = JobKind.REINFORCEMENT
    spec_class: ClassVar[type[BaseModel]] = ReinforcementSpec

    async def _rater(
        self, context: JobContext[ReinforcementSpec], source: Source, standing: PolicyStanding
    ) -> GraderRater:
        jury = Jury(context, context.spec.grader)
        await jury.check_models()
        if standing.step < 0:
            await _check_rows(jury, source)
        reference = Reference(context=context, course=source.course, data=source.data, model=context.spec.model)
        return GraderRater(context=context, spec=context.spec, standing=standing, jury=jury, reference=reference)

    async def reckon(self, context: JobContext[ReinforcementSpec]) -> Work:
        """As others do; what models that judge read and write is not counted, and they are named."""
        work = await super().reckon(context)
        parts = parts_of(context.spec.grader).values()
        judges = sorted({part.model for part in parts if isinstance(part, ModelGraderPart)})
        return replace(work, details={**work.details, "judges_not_counted": judges}) if judges else work

    async def _questions(self, context: JobContext[ReinforcementSpec], base_model: str) -> Questions | None:
        return Questions(base_model=base_model, of_evaluations=False) if context.spec.kl_coef else None

    def _loss(self, spec: ReinforcementSpec) -> tuple[str, dict[str, float | int | bool | str], int]:
        return spec.loss, spec.loss_config, spec.group_size


class DistillPlan(PolicyPlan[DistillSpec]):
    """``distill``."""

    kind: ClassVar[JobKind] = JobKind.DISTILL
    spec_class: ClassVar[type[BaseModel]] = DistillSpec

    async def run(self, context: JobContext[DistillSpec]) -> JsonObject:
        """On policy a training of its own kind; off policy a supervised one, on what the teacher answers."""
        if context.spec.mode == "off_policy":
            return await SupervisedByTeacher().run(context)
        return await super().run(context)

    async def reckon(self, context: JobContext[DistillSpec]) -> Work:
        """On policy as others do; off policy the teacher's answers, and a training on as many rows."""
        if context.spec.mode != "off_policy":
            return await super().reckon(context)
        base_model = await base_model_of(context, context.spec.model)
        teacher = await base_model_of(context, context.spec.teacher, field="teacher")
        adapter = await shape_of(context)
        prompts = await open_prompts(context, base_model, seed=self._seed(context))
        return await work_of_teaching(context, prompts, base_model=base_model, teacher=teacher, adapter=adapter)

    async def _questions(self, context: JobContext[DistillSpec], base_model: str) -> Questions:
        teacher = await base_model_of(context, context.spec.teacher, field="teacher")
        return Questions(base_model=teacher, of_evaluations=True)

    async def _rater(self, context: JobContext[DistillSpec], source: Source, standing: PolicyStanding) -> TeacherRater:
        spec = context.spec
        theirs = await base_model_of(context, spec.teacher, field="teacher")
        if theirs != source.base_model:
            ours, other = [await context.tools.vocabulary(model) for model in (source.base_model, theirs)]
            if ours != other:
                raise JobFailed(
                    "other_vocabulary",
                    f"{theirs} and {source.base_model} have other tokens, so a teacher cannot judge the student's;"
                    " use mode off_policy, which passes texts on",
                    field="teacher",
                )
        teacher = Reference(context=context, course=source.course, data=source.data, model=spec.teacher)
        return TeacherRater(spec=spec, standing=standing, teacher=teacher)

    def _loss(self, spec: DistillSpec) -> tuple[str, dict[str, float | int | bool | str], int]:
        return spec.policy_loss, spec.loss_config, spec.group_size


async def _check_rows(jury: Jury, source: Source) -> None:
    """See that every row has what the grader asks for, before anything is sampled."""
    num_rows = source.course.num_rows + source.course.num_eval_rows
    problems: list[str] = []
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        places = range(start, min(start + _ROWS_AT_ONCE, num_rows))
        problems += jury.check_rows(await source.prompts(places))
    if problems:
        raise missing_fields(problems)
