"""A step of learning from answers: sampled from the weights as they are, rated, passed, and applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.job import JobEvent
from twinkle.jobs.reinforcement.course import PolicyStanding
from twinkle.jobs.reinforcement.rating import Rated, Rater
from twinkle.jobs.reinforcement.rollouts import Answer, of_answer, policy_datum
from twinkle.jobs.reinforcement.sampling import Source
from twinkle.jobs.run import JobRun, JobSampler, Ticket
from twinkle.jobs.training.course import cut
from twinkle.jobs.training.datums import Amount
from twinkle.jobs.training.steps import LOSS, Outcome, adam_of, outcome_of
from twinkle.wire.bodies.jobs_rl import ReinforcementSpec
from twinkle.wire.bodies.jobs_training import checkpoint_name, wire_config
from twinkle.wire.bodies.training import OptimStepResponse, SaveWeightsForSamplerResponse, SaveWeightsResponse
from twinkle.wire.training_result import ForwardBackwardResult

ENTROPY = "entropy:mean"
_SHOWN_CHARACTERS = 1000

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicySubmitted:
    """A step that is in the journal."""

    step: int
    answers: Sequence[Answer]
    rated: Rated | None
    passes: Sequence[Ticket[ForwardBackwardResult]]
    optim: Ticket[OptimStepResponse] | None
    evaluated_by: JobSampler | None
    state: Ticket[SaveWeightsResponse] | None
    weights: Ticket[SaveWeightsForSamplerResponse] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyOutcome(Outcome):
    """What came of a step, with what is told of it beside its metrics."""

    events: Sequence[JobEvent] = field(default=())


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicySteps:
    """Submits the steps of one run, and takes their results in."""

    source: Source
    loss: str
    loss_config: dict[str, float | int | bool | str]
    run: JobRun
    standing: PolicyStanding
    rater: Rater

    async def submit(self, step: int, number: int) -> PolicySubmitted:
        """Hand a step over, its first operation under this number. It waits for answers and their grades."""
        course, numbers = self.source.course, iter(range(number, number + self.source.course.operations_of(step)))
        answers: list[Answer] = []
        rated, optim = None, None
        passes: list[Ticket[ForwardBackwardResult]] = []
        if step:
            answers = await self._answers(next(numbers), step)
            rated = await self.rater.rate(answers, step)
            passes = await self._train(answers, rated, numbers)
            optim = await self.run.optim_step(next(numbers), adam_of(self.source.spec, course, step))
        evaluated_by = None
        if course.evaluates_after(step):
            evaluated_by = await self._sampler(next(numbers), step, for_evaluation=True)
        state = weights = None
        if course.saves_after(step):
            state = await self.run.save_weights(next(numbers), checkpoint_name(step))
            weights = await self.run.save_weights_for_sampler(next(numbers), checkpoint_name(step))
        return PolicySubmitted(
            step=step,
            answers=answers,
            rated=rated,
            passes=passes,
            optim=optim,
            evaluated_by=evaluated_by,
            state=state,
            weights=weights,
        )

    async def collect(self, submitted: PolicySubmitted) -> PolicyOutcome:
        """Wait for all results of a step.

        Raises:
            JobFailed: An operation failed by what the job asked.
            OperationFailed: One failed for a reason of the service's.
        """
        step, answers = submitted.step, submitted.answers
        results = [await self._result(step, ticket) for ticket in submitted.passes]
        figures = _figures(answers, submitted.rated, results)
        if submitted.optim is not None:
            metrics = (await self._result(step, submitted.optim)).metrics or {}
            figures |= {name: metrics[name] for name in ("grad_norm",) if name in metrics}
        events = _shown(answers, submitted.rated, step)
        eval_figures = None
        if submitted.evaluated_by is not None:
            eval_figures, told = await self._evaluate(submitted.evaluated_by, step)
            events += told
        path = sampler_path = None
        if submitted.state is not None:
            path = (await self._result(step, submitted.state)).path
        if submitted.weights is not None:
            sampler_path = (await self._result(step, submitted.weights)).path
        num_answered = sum(answer.num_tokens for answer in answers)
        return PolicyOutcome(
            step=step,
            amount=Amount(
                num_tokens=sum(len(answer.whole) for answer in answers),
                num_trained=num_answered,
                weight=float(num_answered),
            ),
            figures=figures,
            eval_figures=eval_figures,
            path=path,
            sampler_path=sampler_path,
            events=events,
        )

    async def _answers(self, number: int, step: int) -> list[Answer]:
        course = self.source.course
        sampler = await self._sampler(number, step, for_evaluation=False)
        prompts = await self.source.prompts(course.rows_of(step))
        return await self.source.draw(sampler, prompts, count=course.group_size, what="answer", step=step)

    async def _evaluate(self, sampler: JobSampler, step: int) -> tuple[dict[str, float], list[JobEvent]]:
        course, spec = self.source.course, self.source.spec
        count = spec.eval_answers if isinstance(spec, ReinforcementSpec) else 1
        places = range(course.num_rows, course.num_rows + course.num_eval_rows)
        prompts = await self.source.prompts(places)
        answers = await self.source.draw(sampler, prompts, count=count, what="evaluation", step=step)
        return await self.rater.evaluate(answers, step)

    async def _train(
        self, answers: Sequence[Answer], rated: Rated, numbers: Iterator[int]
    ) -> list[Ticket[ForwardBackwardResult]]:
        # Losses of single answers are sums: divided by the step's tokens they are its mean. Others divide themselves.
        divisor = 1.0 if self.loss in BATCH_LOSSES else float(sum(answer.num_tokens for answer in answers))
        config = wire_config(self.loss_config)
        references = [None] * len(answers) if rated.reference is None else rated.reference
        if rated.reference is not None and isinstance(self.source.spec, ReinforcementSpec):
            config["beta"] = self.source.spec.kl_coef
        datums = [
            policy_datum(
                answer,
                advantages / divisor,
                loss=self.loss,
                reference=None if reference is None else reference.astype(np.float32),
            )
            for answer, advantages, reference in zip(answers, rated.advantages, references, strict=True)
        ]
        passes = []
        for places in cut(range(len(datums)), self.source.course.answers_per_operation):
            own = [datums[place] for place in places]
            passes.append(await self.run.forward_backward(next(numbers), own, self.loss, config))
        return passes

    async def _sampler(self, number: int, step: int, *, for_evaluation: bool) -> JobSampler:
        generation = self.standing.generation
        index = self.source.course.sampler_number(generation, step, for_evaluation=for_evaluation)
        return await self.run.open_sampler(number, index)

    async def _result(self, step: int, ticket: Ticket[ResultT]) -> ResultT:
        return await outcome_of(ticket, f"step {step}", self.source.data)


def _figures(
    answers: Sequence[Answer], rated: Rated | None, results: Sequence[ForwardBackwardResult]
) -> dict[str, float]:
    if rated is None:
        return {}
    told = [logprobs for result in results for logprobs in result.logprobs]
    gaps = [answer.logprobs - of_answer(answer, logprobs) for answer, logprobs in zip(answers, told, strict=True)]
    entropies = [result.metrics[ENTROPY] for result in results if ENTROPY in result.metrics]
    return {
        "loss": sum(result.metrics[LOSS] for result in results),
        **rated.figures,
        # A loss that counts it has the whole step in one operation.
        **({"entropy": entropies[0]} if entropies else {}),
        "answer_tokens": float(np.mean([answer.num_tokens for answer in answers])),
        "ended": float(np.mean([answer.has_ended for answer in answers])),
        # Sampler against trainer on the same weights: away from 0 something is wrong with the service.
        "kl_sampler": float(np.concatenate(gaps).mean()),
    }


def _shown(answers: Sequence[Answer], rated: Rated | None, step: int) -> list[JobEvent]:
    """One answer of the step, for people."""
    if not answers or rated is None:
        return []
    first = answers[0]
    data = {"step": step, "row": first.prompt.number, "text": first.text[:_SHOWN_CHARACTERS]}
    if rated.first_reward is not None:
        data["reward"] = rated.first_reward
    return [JobEvent(kind="sample", message=f"step {step}, {first.prompt}", data=data)]
