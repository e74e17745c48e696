"""``/v1/fine_tuning/alpha/graders``: a grader tried on one answer, before a job is given to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import StorageUnavailable, TransientError, UserError
from twinkle.grading.grade import Answer, Grade, GraderFailed, Judgement, ProblemKind, RewardRequest, grade
from twinkle.grading.rewards import RewardProcesses
from twinkle.server.openai.answers import choices_of, json_answer
from twinkle.server.openai.chat import plan_turn
from twinkle.server.openai.ordering import draw
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import SESSION_HEADER
from twinkle.server.state import Caller, Server, ServerState
from twinkle.wire.bodies.graders import (
    DEFAULT_JUDGE_TOKENS,
    Grader,
    GraderErrors,
    GraderRunMetadata,
    GraderRunRequest,
    GraderRunResponse,
    GraderValidateRequest,
    GraderValidateResponse,
    JudgeSampling,
    ModelGraderPart,
    parts_of,
)
from twinkle.wire.bodies.jobs_base import parse_part
from twinkle.wire.bodies.openai import ChatMessage, ChatRequest

router = APIRouter(prefix="/fine_tuning/alpha/graders")


@router.post(
    "/validate",
    openapi_extra=described(GraderValidateResponse, body=GraderValidateRequest, access=Access.CALLER),
)
async def validate_grader(request: Request, server: Server, tenant: Caller) -> Response:
    """Say whether a grader can be read; it is not run."""
    raw = await server.common.bodies.read(request)
    body = await server.common.object_io.run(parse_part, GraderValidateRequest, raw)
    written = body.grader.model_dump(mode="json", exclude_none=True)
    return json_answer(GraderValidateResponse(grader=written).model_dump())


@router.post(
    "/run",
    openapi_extra=described(
        GraderRunResponse, body=GraderRunRequest, headers=["Idempotency-Key", SESSION_HEADER], access=Access.CALLER
    ),
)
async def run_grader(request: Request, server: Server, tenant: Caller) -> Response:
    """Judge one answer."""
    raw = await server.common.bodies.read(request)
    body = await server.common.object_io.run(parse_part, GraderRunRequest, raw)
    started = server.common.clock.now()
    judges = _ServedJudges(server, request, tenant)
    rewards = _TenantRewards(server.jobs.rewards, tenant)
    found = await grade(body.grader, Answer(body.model_sample, body.item or {}), judges, rewards)
    answer = GraderRunResponse(
        reward=found.score,
        sub_rewards=dict(found.scores),
        model_grader_token_usage_per_model=dict(found.judge_tokens),
        metadata=GraderRunMetadata(
            errors=_errors(found),
            execution_time=server.common.clock.now() - started,
            name=body.grader.name,
            sampled_model_name=_judging_model(body.grader),
            scores=dict(found.scores),
            token_usage=sum(found.judge_tokens.values()) if found.judge_tokens else None,
            type=body.grader.type,
        ),
    )
    return json_answer(answer.model_dump())


class _ServedJudges:
    """Asks the models of this server as ``/v1/chat/completions`` does; each answer is a sample in the journal."""

    def __init__(self, server: ServerState, request: Request, tenant: str) -> None:
        self._server = server
        self._request = request
        self._tenant = tenant

    async def ask(
        self, model: str, messages: Sequence[Mapping[str, str]], sampling: JudgeSampling, *, grader: str
    ) -> Judgement:
        """See :class:`twinkle.grading.grade.Judges`."""
        body = ChatRequest(
            model=model,
            messages=[ChatMessage.model_validate(message) for message in messages],
            max_completion_tokens=sampling.max_completions_tokens or DEFAULT_JUDGE_TOKENS,
            temperature=sampling.temperature or 0.0,
            top_p=sampling.top_p,
            seed=sampling.seed,
        )
        try:
            served, text_model, drawing = await plan_turn(self._server, self._tenant, body)
            drawn = await draw(
                self._server, self._request, self._tenant, served, text_model, [drawing], part=f"{grader}:"
            )
        except StorageUnavailable:
            raise
        except (UserError, TransientError) as error:
            raise GraderFailed(ProblemKind.JUDGE, error.message) from error
        choice = (await self._server.common.object_io.run(choices_of, drawn, [drawing], text_model))[0]
        return Judgement(choice.text, len(drawing.tokens) + len(choice.tokens))


@dataclass(frozen=True)
class _TenantRewards:
    processes: RewardProcesses
    tenant: str

    async def grade(self, request: RewardRequest) -> float:
        """See :class:`twinkle.grading.grade.Rewards`."""
        return await self.processes.grade(self.tenant, request)


def _errors(found: Grade) -> GraderErrors:
    kinds = {problem.kind for problem in found.problems}
    judge = next((problem.message for problem in found.problems if problem.kind is ProblemKind.JUDGE), None)
    return GraderErrors(
        formula_parse_error=ProblemKind.FORMULA in kinds,
        invalid_variable_error=ProblemKind.VARIABLE in kinds,
        sample_parse_error=ProblemKind.SAMPLE in kinds,
        model_grader_parse_error=ProblemKind.JUDGE_ANSWER in kinds,
        model_grader_server_error=ProblemKind.JUDGE in kinds,
        model_grader_server_error_details=judge,
        unresponsive_reward_error=ProblemKind.TIMEOUT in kinds,
        other_error=ProblemKind.OTHER in kinds,
    )


def _judging_model(grader: Grader) -> str | None:
    return next((part.model for part in parts_of(grader).values() if isinstance(part, ModelGraderPart)), None)
