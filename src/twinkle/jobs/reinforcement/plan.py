"""The plans of kinds ``grpo`` and ``distill``: a training whose steps make their own data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from twinkle.core.job import JobFailed, JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataUse
from twinkle.jobs.reinforcement.course import PolicyCourse, PolicyStanding, decide_policy
from twinkle.jobs.reinforcement.judging import Jury, missing_fields
from twinkle.jobs.reinforcement.rating import GraderRater, Rater, TeacherRater
from twinkle.jobs.reinforcement.sampling import Reference, Source
from twinkle.jobs.reinforcement.steps import PolicyOutcome, PolicySteps
from twinkle.jobs.reinforcement.teaching import SupervisedByTeacher
from twinkle.jobs.run import JobRun
from twinkle.jobs.training.data import TrainingData, open_data
from twinkle.jobs.training.plan import TrainingPlan, base_model_of
from twinkle.jobs.training.standing import Kept, Standing
from twinkle.jobs.training.steps import Outcome
from twinkle.jobs.training.training import StepsOfRun, Training
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
