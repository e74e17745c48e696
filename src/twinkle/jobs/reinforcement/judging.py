"""What the answers of a step are worth: each is graded once, and what fails scores 0 and is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.core.job import JobEvent, JobFailed
from twinkle.grading import grade as grading
from twinkle.grading.grade import Grade, GraderFailed, Judgement, Problem, ProblemKind, RewardRequest
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import MOST_PROBLEMS
from twinkle.jobs.reinforcement.asking import ask_model
from twinkle.jobs.reinforcement.rollouts import Answer, Prompt
from twinkle.wire.bodies.graders import (
    DEFAULT_JUDGE_TOKENS,
    Grader,
    JudgeSampling,
    ModelGraderPart,
    item_fields,
    parts_of,
)

_MISSING = 404
_AT_ONCE = 8
_SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class Grades:
    """What came of grading the answers of a step, as it is saved: plain values."""

    scores: list[float]
    figures: dict[str, float]
    num_failed: int
    """Answers in whose grading something failed."""


class Jury:
    """Grades the answers of one job."""

    def __init__(self, context: JobContext[Any], grader: Grader) -> None:
        self._context = context
        self._grader = grader

    async def check_models(self) -> None:
        """See that the models that judge are there.

        Raises:
            JobFailed: One is not.
        """
        for part in parts_of(self._grader).values():
            if isinstance(part, ModelGraderPart):
                answer = await self._context.door.request("GET", f"/v1/models/{part.model}")
                if answer.status_code == _MISSING:
                    raise JobFailed("model_not_found", answer.json()["error"]["message"], field="grader.model")

    def check_rows(self, prompts: Sequence[Prompt]) -> list[str]:
        """What the rows lack that the grader asks for."""
        asked = item_fields(self._grader)
        return [
            f"{prompt}: {name}: is missing; the grader asks for item.{name}"
            for prompt in prompts
            for name in sorted(asked - prompt.item.keys())
        ]

    async def grade(self, answers: Sequence[Answer], *, key: tuple[int, ...]) -> tuple[Grades, list[JobEvent]]:
        """The grades of answers; the key is that of the step, the same in every attempt."""
        judges = _DoorJudges(self._context, key)
        places = asyncio.Semaphore(_AT_ONCE)

        async def grade_one(number: int, answer: Answer) -> Grade:
            async with places:
                judged = grading.Answer(answer.text, answer.prompt.item)
                return await grading.grade(self._grader, judged, judges.of(number), self._rewards)

        found = await asyncio.gather(*[grade_one(number, answer) for number, answer in enumerate(answers)])
        failed = [one for one in found if one.problems]
        grades = Grades(scores=[one.score for one in found], figures=_figures(found), num_failed=len(failed))
        problems = [problem for one in failed for problem in one.problems]
        return grades, [_told(problems, len(failed), len(found), key)] if failed else []

    @property
    def _rewards(self) -> _ToolRewards:
        return _ToolRewards(self._context)


def missing_fields(problems: Sequence[str]) -> JobFailed:
    """Rows that cannot be graded, told before anything is sampled."""
    shown = "; ".join(problems[:_SHOWN_PROBLEMS])
    more = "; ..." if len(problems) > _SHOWN_PROBLEMS else ""
    return JobFailed(
        "invalid_data",
        f"{len(problems)} fields that the grader asks for are missing: {shown}{more}",
        field="data",
        details={"errors": list(problems[:MOST_PROBLEMS])},
    )


@dataclass(frozen=True)
class _ToolRewards:
    context: JobContext[Any]

    async def grade(self, request: RewardRequest) -> float:
        """See :class:`twinkle.grading.grade.Rewards`."""
        return await self.context.tools.grade(self.context.job.tenant, request)


@dataclass(frozen=True)
class _DoorJudges:
    """Asks the models as whoever uses the OpenAI-compatible routes, under keys that follow from what is judged."""

    context: JobContext[Any]
    key: tuple[int, ...]
    number: int = 0

    def of(self, number: int) -> _DoorJudges:
        """For one answer."""
        return _DoorJudges(self.context, self.key, number)

    async def ask(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: JudgeSampling, *, grader: str
    ) -> Judgement:
        """See :class:`twinkle.grading.grade.Judges`."""
        parts = ("judge", *self.key, self.number, grader)
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "max_completion_tokens": sampling.max_completions_tokens or DEFAULT_JUDGE_TOKENS,
            "temperature": sampling.temperature or 0.0,
            "seed": self.context.seed_of(*parts) if sampling.seed is None else sampling.seed,
        }
        if sampling.top_p is not None:
            body["top_p"] = sampling.top_p
        answer = await ask_model(self.context, "/v1/chat/completions", body, key=parts)
        if not answer.is_success:
            raise GraderFailed(ProblemKind.JUDGE, answer.json()["error"]["message"])
        told = answer.json()
        return Judgement(told["choices"][0]["message"]["content"], told["usage"]["total_tokens"])


def _figures(found: Sequence[Grade]) -> dict[str, float]:
    """The mean score, and those of a grader's parts."""
    count = len(found) or 1
    figures = {"reward": sum(one.score for one in found) / count}
    names = list(found[0].scores) if found else []
    if len(names) > 1:
        figures |= {f"reward/{name}": sum(one.scores[name] for one in found) / count for name in names}
    judged = sum(sum(one.judge_tokens.values()) for one in found)
    return figures | ({"judge_tokens": float(judged)} if judged else {})


def _told(problems: Sequence[Problem], num_failed: int, num_answers: int, key: tuple[int, ...]) -> JobEvent:
    kinds = Counter(f"{problem.grader}: {problem.kind.value}" for problem in problems)
    first = problems[0]
    return JobEvent(
        kind="message",
        message=f"{num_failed} of {num_answers} answers could not be graded wholly, what failed scored 0;"
        f" first {first.grader}: {first.message}",
        data={"step": key[-1], "graders": dict(kinds)},
    )
