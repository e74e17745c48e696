"""What is to be learnt from a step's answers: from a grader's rewards, or from what a teacher thinks of every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from twinkle.core.batch_loss import BATCH_LOSSES
from twinkle.core.job import JobEvent
from twinkle.jobs.context import JobContext
from twinkle.jobs.reinforcement.advantages import advantages_of, without_spread
from twinkle.jobs.reinforcement.course import PolicyStanding
from twinkle.jobs.reinforcement.judging import Grades, Jury
from twinkle.jobs.reinforcement.rollouts import Answer, penalized
from twinkle.jobs.reinforcement.sampling import Reference
from twinkle.wire.bodies.jobs_rl import DistillSpec, ReinforcementSpec

Rows = list[npt.NDArray[np.float64]]
_EVALUATION = 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Rated:
    """What a step's answers are trained with: (A,) advantages of each, and where the loss takes it the reference."""

    advantages: Rows
    reference: Rows | None
    figures: dict[str, float]
    first_reward: float | None
    """Of the first answer, which is told."""


class Rater(Protocol):
    """Says what is to be learnt from answers."""

    async def rate(self, answers: Sequence[Answer], step: int) -> Rated:
        """The advantages of a step's answers, those to one prompt next to each other."""
        ...

    async def evaluate(self, answers: Sequence[Answer], step: int) -> tuple[dict[str, float], list[JobEvent]]:
        """How good answers to the prompts of an evaluation are: figures, with ``eval_loss`` that is to fall."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class GraderRater:
    """Rewards of a grader, compared within each prompt's answers."""

    context: JobContext[Any]
    spec: ReinforcementSpec
    standing: PolicyStanding
    jury: Jury
    reference: Reference

    async def rate(self, answers: Sequence[Answer], step: int) -> Rated:
        """See :class:`Rater`."""
        grades = await self._grades(answers, step)
        spec = self.spec
        rewards = np.array(grades.scores, np.float64).reshape(-1, spec.group_size)
        values = advantages_of(rewards, estimator=spec.advantage, scale=spec.advantage_scale).flatten()
        advantages = [np.full(answer.num_tokens, value) for answer, value in zip(answers, values, strict=True)]
        figures = {**grades.figures, "reward_std": float(rewards.std()), "without_spread": without_spread(rewards)}
        reference = None
        if spec.kl_coef:
            reference = await self.reference.logprobs(answers, generation=self.standing.generation, step=step)
            own = [answer.logprobs.astype(np.float64) for answer in answers]
            figures["kl_reference"] = _mean_gap(own, reference)
            if spec.loss not in BATCH_LOSSES:
                advantages, reference = penalized(advantages, own, reference, spec.kl_coef), None
        return Rated(advantages=advantages, reference=reference, figures=figures, first_reward=grades.scores[0])

    async def evaluate(self, answers: Sequence[Answer], step: int) -> tuple[dict[str, float], list[JobEvent]]:
        """See :class:`Rater`. What is to fall is the reward with its sign turned."""
        grades, events = await self.jury.grade(answers, key=(self.standing.generation, _EVALUATION, step))
        figures = {f"eval_{name}": value for name, value in grades.figures.items()}
        return {"eval_loss": -grades.figures["reward"], **figures}, events

    async def _grades(self, answers: Sequence[Answer], step: int) -> Grades:
        """Given once: what they were is saved before anything is trained on it."""
        standing = self.standing
        of_step = {"generation": standing.generation, "step": step}
        if standing.graded is not None and {name: standing.graded[name] for name in of_step} == of_step:
            return Grades(**standing.graded["grades"])
        grades, events = await self.jury.grade(answers, key=(standing.generation, 0, step))
        standing.graded = {**of_step, "grades": asdict(grades)}
        standing.num_ungraded += grades.num_failed
        await self.context.save(standing.to_json(), events=events, ungraded_answers=standing.num_ungraded)
        return grades


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherRater:
    """Each token is worth what the teacher gives it more than the student: the reverse KL, token by token.

    ``A = -kl_coef (log p_student - log p_teacher)`` of the sampled tokens (Agarwal et al. 2023, arXiv 2306.13649, in
    the form of the Tinker cookbook's on-policy distillation).
    """

    spec: DistillSpec
    standing: PolicyStanding
    teacher: Reference

    async def rate(self, answers: Sequence[Answer], step: int) -> Rated:
        """See :class:`Rater`."""
        gaps = await self._gaps(answers, step)
        figures = {"reverse_kl": float(np.concatenate(gaps).mean())}
        advantages = [-self.spec.kl_coef * gap for gap in gaps]
        return Rated(advantages=advantages, reference=None, figures=figures, first_reward=None)

    async def evaluate(self, answers: Sequence[Answer], step: int) -> tuple[dict[str, float], list[JobEvent]]:
        """See :class:`Rater`."""
        gaps = await self._gaps(answers, step, for_evaluation=True)
        return {"eval_loss": float(np.concatenate(gaps).mean())}, []

    async def _gaps(self, answers: Sequence[Answer], step: int, *, for_evaluation: bool = False) -> Rows:
        told = await self.teacher.logprobs(
            answers, generation=self.standing.generation, step=step, for_evaluation=for_evaluation
        )
        return [answer.logprobs.astype(np.float64) - other for answer, other in zip(answers, told, strict=True)]


def _mean_gap(own: Rows, reference: Rows) -> float:
    return float((np.concatenate(own) - np.concatenate(reference)).mean())
