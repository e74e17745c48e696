"""From a prompt to samples: the one write path, then the wait for the outcome."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from twinkle.core.adapter import CheckpointKind
from twinkle.core.errors import (
    Expired,
    InvalidInput,
    NotFound,
    StorageUnavailable,
    TransientError,
    TwinkleError,
    UserError,
)
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import FailureCategory, FutureStatus, OperationKind, Payload, Submission
from twinkle.scheduler.placement import choose_mesh
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.bodies import DrawRequest
from twinkle.server.openai.callers import new_openai_session, number_of
from twinkle.server.state import ServerState
from twinkle.server.tinker.answers import canonical_json
from twinkle.storage.payloads import read_payload
from twinkle.storage.records import NewSamplingSession
from twinkle.wire.bodies.base import invalid_input
from twinkle.wire.digest import body_digest
from twinkle.wire.paths import SCHEME, SamplingSessionId, parse_checkpoint_path
from twinkle.wire.sample_result import SampleResult, decode_sample_response
from twinkle.wire.sampling import Prompt, PromptChunk, SampleRequest, SamplingParams

_SEED_BITS = 63
_MAX_IDEMPOTENCY_KEY_LENGTH = 256
# The client's own patience is ten minutes; between looks it may have hung up.
_LONGEST_WAIT_S = 600.0
_LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as a request names it, and the mesh that serves it."""

    name: str
    base_model: str
    checkpoint: str | None
    mesh: str
    capabilities: MeshCapabilities


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn from one prompt. ``stops`` are texts; the model's own end always stops too."""

    tokens: list[int]
    num_samples: int
    max_tokens: int
    topk: int
    stops: tuple[str, ...]
    temperature: float
    top_p: float
    seed: int | None


@dataclass(frozen=True)
class Drawn:
    """The samples of one prompt, and the id of the operation that drew them."""

    request_id: str
    result: SampleResult


async def find_model(server: ServerState, tenant: str, name: str) -> ServedModel:
    """What a model's name stands for.

    Raises:
        NotFound: No such base model is served, or no such checkpoint exists, or it is another tenant's.
        InvalidInput: It is a checkpoint one cannot sample from.
    """
    base_model, checkpoint = name, None
    if name.startswith(SCHEME):
        found = await server.sql.run(
            server.catalog.checkpoint, str(parse_checkpoint_path(name, field="model")), tenant=tenant
        )
        if found.kind is CheckpointKind.EXTERNAL:
            raise InvalidInput("model", f"{name} is an export to take away; sample from a sampler checkpoint")
        base_model, checkpoint = found.config.base_model, name
    try:
        mesh = choose_mesh(await server.meshes.all(), base_model)
    except InvalidInput as error:
        raise NotFound(f"the model {base_model!r} is not served here; GET /v1/models lists what is") from error
    assert mesh.capabilities is not None, "a chosen mesh has said what it serves"
    return ServedModel(
        name=name, base_model=base_model, checkpoint=checkpoint, mesh=mesh.name, capabilities=mesh.capabilities
    )


def plan(
    body: DrawRequest,
    model: ServedModel,
    text_model: TextModel | None,
    tokens: list[int],
    *,
    topk: int,
    max_tokens: int | None,
) -> Drawing:
    """A request's drawing from one prompt; without ``max_tokens`` it may fill the context.

    Raises:
        InvalidInput: The prompt is empty or fills the context already, or stop texts come to a model without tokenizer.
    """
    room = model.capabilities.max_context_length - len(tokens)
    if not tokens:
        raise InvalidInput("prompt", "has no tokens")
    if room < 1:
        raise InvalidInput(
            "prompt", f"has {len(tokens)} tokens; {model.name} takes {len(tokens) + room}, output included"
        )
    if body.stop and text_model is None:
        raise InvalidInput("stop", f"the server has no tokenizer of {model.name} to find texts with; leave it out")
    return Drawing(
        tokens=tokens,
        num_samples=body.n or 1,
        max_tokens=min(max_tokens or room, room),
        topk=topk,
        stops=tuple(body.stop or ()),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=body.seed,
    )


async def draw(
    server: ServerState,
    request: Request,
    tenant: str,
    model: ServedModel,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
) -> list[Drawn]:
    """Submit every drawing, then wait for all of them.

    Without an ``Idempotency-Key`` nobody can ask for the outcome again, so what is not delivered is cancelled.
    """
    key = request.headers.get("idempotency-key", "")
    if len(key) > _MAX_IDEMPOTENCY_KEY_LENGTH:
        raise InvalidInput("Idempotency-Key", f"has more than {_MAX_IDEMPOTENCY_KEY_LENGTH} characters")
    lane = await _lane(server, tenant, model)
    end_texts = () if text_model is None else text_model.end_texts
    request_ids: list[str] = []
    try:
        for i, drawing in enumerate(drawings):
            seq = number_of(key, str(i)) if key else secrets.randbits(62)
            request_ids.append(await _submit(server, tenant, _sample(drawing, lane, seq, end_texts)))
        return [Drawn(request_id, await _outcome(server, request, tenant, request_id)) for request_id in request_ids]
    except (TwinkleError, ClientDisconnect):
        if not key:
            await _cancel(server, tenant, request_ids)
        raise


async def _lane(server: ServerState, tenant: str, model: ServedModel) -> str:
    session = await server.sql.run(server.directory.open_session, tenant, new_openai_session())
    lane = str(SamplingSessionId(session, number_of(model.mesh, model.name)))
    try:
        await server.sql.run(server.catalog.sampling_session, lane, tenant=tenant)
    except NotFound:
        await server.submitter.open_lane(
            NewSamplingSession(
                id=lane,
                tenant=tenant,
                session=session,
                mesh=model.mesh,
                base_model=model.base_model,
                model_path=model.checkpoint,
                checkpoint=model.checkpoint,
            )
        )
    return lane


def _sample(drawing: Drawing, lane: str, seq: int, end_texts: Sequence[str]) -> SampleRequest:
    # Given stop texts, a sample no longer stops at the model's own end by itself.
    stop = [*drawing.stops, *end_texts] if drawing.stops else None
    try:
        return SampleRequest(
            prompt=Prompt(chunks=[PromptChunk(tokens=drawing.tokens)]),
            sampling_params=SamplingParams(
                max_tokens=drawing.max_tokens,
                seed=drawing.seed,
                stop=stop,
                temperature=drawing.temperature,
                top_p=drawing.top_p,
            ),
            num_samples=drawing.num_samples,
            sampling_session_id=lane,
            seq_id=seq,
            topk_sample_logprobs=drawing.topk,
        )
    except ValidationError as error:
        raise invalid_input(error) from error


async def _submit(server: ServerState, tenant: str, sample: SampleRequest) -> str:
    params = sample.sampling_params
    if params.seed is None:
        params = params.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})
    num_prompt_tokens = len(sample.prompt_tokens())
    assert sample.sampling_session_id is not None and sample.seq_id is not None
    await server.quotas.take_sample(tenant)
    accepted = await server.submitter.submit(
        Submission(
            tenant=tenant,
            lane=sample.sampling_session_id,
            seq=sample.seq_id,
            kind=OperationKind.SAMPLE,
            digest=body_digest(sample),
            payload=Payload(inline=canonical_json(sample.model_copy(update={"sampling_params": params}))),
            num_tokens=num_prompt_tokens + sample.num_samples * (params.max_tokens or 0),
            num_prompt_tokens=num_prompt_tokens,
        )
    )
    return accepted.request_id


async def _outcome(server: ServerState, request: Request, tenant: str, request_id: str) -> SampleResult:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _LONGEST_WAIT_S
    while True:
        looked_at = loop.time()
        owned = await server.futures.wait(request_id, tenant, _LOOK_S)
        if owned.status.state.is_final:
            return await _result(server, owned.status)
        if loop.time() - looked_at < _LOOK_S / 2:
            raise TransientError("the server is about to stop; send the request again")
        if await request.is_disconnected():
            raise ClientDisconnect
        if loop.time() > deadline:
            reason = await server.meshes.why_waiting(owned.mesh)
            raise TransientError(reason or f"the sample has not ended within {_LONGEST_WAIT_S:.0f} s; send it again")


async def _result(server: ServerState, status: FutureStatus) -> SampleResult:
    if status.expired:
        raise Expired("the result under this Idempotency-Key was kept for its time and is gone")
    if status.failure is not None:
        kind = UserError if status.failure.category is FailureCategory.USER else TwinkleError
        raise kind(status.failure.message)
    assert status.result is not None, "a final future has a result or a failure"
    data = status.result.inline
    if data is None:
        data = await server.object_io.run(read_payload, server.blobs, status.result)
    return decode_sample_response(data)


async def _cancel(server: ServerState, tenant: str, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        with suppress(StorageUnavailable):
            await server.sql.run(server.sample_journal.cancel, request_id, tenant)
