"""Sampling sessions and samples. Samples have numbers too, but no order: a bad one may simply be refused."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import Checkpoint
from twinkle.core.errors import Conflict, InvalidInput
from twinkle.core.model_names import plain_model_name
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.scheduler.placement import choose_mesh
from twinkle.server.admission.offers import check_sample, count_sample, refuse_whole_model
from twinkle.server.openapi import described
from twinkle.server.receiving.request_metadata import priority_of
from twinkle.server.state import Accounts, Artifacts, Common, Queue, Server, Tenant
from twinkle.server.tinker.answers import answer, canonical_json
from twinkle.storage.journal.records import NewSamplingSession
from twinkle.storage.sampling.sampling_sessions import SamplingSession
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.futures import FutureResponse
from twinkle.wire.bodies.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SamplerResponse,
)
from twinkle.wire.digest import body_digest
from twinkle.wire.paths import SamplingSessionId
from twinkle.wire.sampling import SampleRequest, parse_sample

_SEED_BITS = 63

router = APIRouter()


@dataclass(frozen=True, kw_only=True)
class ReadSample:
    """A sample's request, ready to be submitted."""

    lane: str
    seq: int
    num_samples: int
    num_tokens: int
    num_prompt_tokens: int
    digest: str
    payload: bytes


@router.post(
    "/create_sampling_session",
    openapi_extra=described(CreateSamplingSessionResponse, body=CreateSamplingSessionRequest, refusals=[404]),
)
async def create_sampling_session(request: Request, server: Server, tenant: Tenant) -> Response:
    """A place to sample from: a base model, or a checkpoint of either kind."""
    body = parse_body(CreateSamplingSessionRequest, await server.common.bodies.read(request))
    owner = await server.common.sql.run(server.accounts.sessions.find, tenant, body.session_id)
    base_model, checkpoint = await _find(server.common, server.artifacts, tenant, body)
    refuse_whole_model(checkpoint, "model_path")
    mesh = choose_mesh(await server.queue.meshes.all(), base_model, to_sample=True)
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    session = NewSamplingSession(
        id=str(SamplingSessionId(body.session_id, body.sampling_session_seq_id)),
        tenant=tenant,
        session=body.session_id,
        mesh=mesh.name,
        base_model=mesh.capabilities.base_model,
        model_path=body.model_path,
        checkpoint=body.model_path,
        content=None if checkpoint is None else checkpoint.content,
        generation=0 if checkpoint is None else checkpoint.generation,
        priority=priority_of(owner.user_metadata),
    )
    await server.accounts.resends.take_sampler(tenant, session.id)
    await server.queue.submitter.open_lane(session)
    _check_same(
        await server.common.sql.run(server.artifacts.sampling_sessions.find, session.id, tenant=tenant), session
    )
    return answer(CreateSamplingSessionResponse(sampling_session_id=session.id))


@router.post(
    "/join_sampling_session",
    openapi_extra=described(JoinSamplingSessionResponse, body=JoinSamplingSessionRequest, refusals=[404]),
)
async def join_sampling_session(request: Request, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """A number for one more client of a sampling session, no other's."""
    body = parse_body(JoinSamplingSessionRequest, await common.bodies.read(request))
    number = await common.sql.run(artifacts.sampling_sessions.join, body.sampling_session_id, tenant)
    return answer(JoinSamplingSessionResponse(client_counter=number))


@router.get("/samplers/{sampler_id}", openapi_extra=described(SamplerResponse, refusals=[404]))
async def show_sampler(sampler_id: str, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """What a sampling session samples from."""
    session = await common.sql.run(artifacts.sampling_sessions.find, sampler_id, tenant=tenant)
    return answer(SamplerResponse(sampler_id=session.id, base_model=session.base_model, model_path=session.model_path))


@router.post("/asample", openapi_extra=described(FutureResponse, body=SampleRequest, refusals=[404]))
async def asample(
    request: Request, common: Common, accounts: Accounts, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Draw samples of one prompt."""
    async with common.bodies.receive(request) as body:
        raw = body.complete()
        if len(raw) <= common.settings.inline_payload_bytes:
            read = _parse(raw)
        else:
            read = await common.object_io.run(_parse, raw)
        counted = await count_sample(common, artifacts, queue, tenant, read)
        lane, seq = _place_of(read)
        judged = _judge(common, accounts, queue, artifacts, tenant, counted)
        await accounts.resends.admit_sample(judged, tenant=tenant, lane=lane, seq=seq)
        sample = _ready(read, counted)
        submission = Submission(
            tenant=tenant,
            lane=sample.lane,
            seq=sample.seq,
            kind=OperationKind.SAMPLE,
            digest=sample.digest,
            payload=Payload(inline=sample.payload),
            num_tokens=sample.num_tokens,
            num_prompt_tokens=sample.num_prompt_tokens,
            num_sequences=sample.num_samples,
        )
        accepted = await queue.submitter.submit(submission)
    sequence_ids = [f"{accepted.request_id}:{i}" for i in range(sample.num_samples)]
    return answer(FutureResponse(request_id=accepted.request_id, sample_sequence_ids=sequence_ids))


async def _judge(
    common: Common, accounts: Accounts, queue: Queue, artifacts: Artifacts, tenant: str, body: SampleRequest
) -> None:
    await check_sample(common, artifacts, queue, tenant, body)
    await accounts.quotas.take_sample(tenant)


def _place_of(body: SampleRequest) -> tuple[str, int]:
    assert body.sampling_session_id is not None and body.seq_id is not None, "they belong together"
    return body.sampling_session_id, body.seq_id


def _parse(raw: bytes) -> SampleRequest:
    body = parse_sample(raw)
    if body.sampling_session_id is None:
        raise InvalidInput("sampling_session_id", "is missing; create a sampling session first")
    return body


def _ready(sent: SampleRequest, body: SampleRequest) -> ReadSample:
    """Makes the seed of a judged body definite; the fingerprint is of what the client sent."""
    lane, seq = _place_of(body)
    params = body.sampling_params
    num_prompt_tokens = body.num_prompt_tokens
    return ReadSample(
        lane=lane,
        seq=seq,
        num_samples=body.num_samples,
        num_tokens=num_prompt_tokens + body.num_samples * (params.max_tokens or 0),
        num_prompt_tokens=num_prompt_tokens,
        digest=body_digest(sent),
        payload=canonical_json(_with_seed(body)),
    )


def _with_seed(body: SampleRequest) -> SampleRequest:
    if body.sampling_params.seed is not None:
        return body
    params = body.sampling_params.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})
    return body.model_copy(update={"sampling_params": params})


async def _find(
    common: Common, artifacts: Artifacts, tenant: str, body: CreateSamplingSessionRequest
) -> tuple[str, Checkpoint | None]:
    """The base model, and what the path means now."""
    if body.model_path is None:
        assert body.base_model is not None, "the body names one of the two"
        return body.base_model, None
    checkpoint = await common.sql.run(artifacts.checkpoints.find, body.model_path, tenant=tenant)
    base_model = checkpoint.config.base_model
    if body.base_model is not None and plain_model_name(body.base_model) != plain_model_name(base_model):
        raise InvalidInput("base_model", f"{body.model_path} belongs to {base_model!r}, not to {body.base_model!r}")
    return base_model, checkpoint


def _check_same(existing: SamplingSession, wanted: NewSamplingSession) -> None:
    is_other = (existing.base_model, existing.checkpoint) != (wanted.base_model, wanted.checkpoint)
    if is_other or existing.weights is not None:
        raise Conflict(f"sampling session {wanted.id} already samples from something else; use the next number")
