"""From a drawing to its samples: the one write path, then the wait for the outcome."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from twinkle.core.errors import (
    Cancelled,
    Expired,
    NotFound,
    StorageUnavailable,
    TransientError,
    TwinkleError,
    UserError,
)
from twinkle.core.ids import request_id_of
from twinkle.core.operation import FailureCategory, FutureStatus, OperationKind, Payload, Submission
from twinkle.scheduler.token_stream import ListenedSample, Listener, SampledInput
from twinkle.server.admission.offers import size_of
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.drawing import Drawing, ServedModel
from twinkle.server.receiving.request_metadata import SESSION_HEADER, idempotency_key, priority_of
from twinkle.server.state import Server
from twinkle.server.tinker.answers import canonical_json
from twinkle.storage.journal.records import NewSamplingSession
from twinkle.storage.payloads import read_payload
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import invalid_input
from twinkle.wire.digest import body_digest
from twinkle.wire.paths import SamplingSessionId
from twinkle.wire.sample_result import SampleResult, decode_sample_response
from twinkle.wire.sampling import SampleRequest, SamplingParams

_SEED_BITS = 63
_SESSION_KEY = "openai"
# The client's own silence is ten minutes; between looks it may have hung up.
_LONGEST_WAIT_S = 600.0
_LOOK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples of one request, each under its number, whether or not they have been submitted."""

    tenant: str
    samples: list[SampleRequest]
    request_ids: list[str]
    is_repeatable: bool
    """Whether somebody can ask for the outcome again."""
    is_background: bool
    """Whether it gives way to others of its tenant."""
    inputs: list[SampledInput] | None = None
    """Of each sample what an answer needs that may be asked for later."""


@dataclass(frozen=True)
class DrawSession:
    """The session in which samples are drawn, and the priority that it gives them."""

    id: str
    priority: int


@dataclass(frozen=True)
class Drawn:
    """The samples of one prompt, and the id of the operation that drew them."""

    request_id: str
    result: SampleResult


class Silence:
    """How long a client has waited without anything to show."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        self.renew()

    def renew(self) -> None:
        """Begin once more: there was something to show."""
        self._ends_at = asyncio.get_running_loop().time() + _LONGEST_WAIT_S

    @property
    def is_over(self) -> bool:
        """Whether it has been too long."""
        return asyncio.get_running_loop().time() > self._ends_at


async def draw(
    server: Server,
    request: Request,
    tenant: str,
    model: ServedModel,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
    *,
    part: str = "",
) -> list[Drawn]:
    """Submit every drawing, then wait for all of them. Several draws for one request are each a ``part`` of it."""
    order = await prepare(server, request, tenant, model, text_model, drawings, part=part)
    silence = Silence()
    try:
        await submit(server, order)
        return [
            Drawn(request_id, await outcome(server, request, tenant, request_id, silence))
            for request_id in order.request_ids
        ]
    except (TwinkleError, ClientDisconnect):
        await give_up(server, order)
        raise


async def prepare(
    server: Server,
    request: Request,
    tenant: str,
    model: ServedModel,
    text_model: TextModel | None,
    drawings: Sequence[Drawing],
    *,
    part: str = "",
) -> SampleOrder:
    """Give every drawing its number: with an ``Idempotency-Key`` the same one every time."""
    key = idempotency_key(request, "Idempotency-Key")
    seqs = [number_of(key, f"{part}{i}") if key else secrets.randbits(62) for i in range(len(drawings))]
    session = await session_of_request(server, request, tenant)
    lane = await lane_of(server, tenant, session, model, repeated_seq=seqs[0] if key else None)
    end_texts = () if text_model is None else text_model.end_texts
    return SampleOrder(
        tenant=tenant,
        samples=[_sample(drawing, lane, seq, end_texts) for drawing, seq in zip(drawings, seqs, strict=True)],
        request_ids=[request_id_of(lane, seq) for seq in seqs],
        is_repeatable=bool(key),
        is_background=session.priority < 0,
    )


async def submit(server: Server, order: SampleOrder, listener: Listener | None = None) -> None:
    """Bring an order into the journal; a listener is told of its tokens on their way."""
    for sample in order.samples:
        assert sample.sampling_session_id is not None and sample.seq_id is not None, "an order's samples have places"
        await server.accounts.resends.admit_sample(
            _judge(server, order, sample),
            tenant=order.tenant,
            lane=sample.sampling_session_id,
            seq=sample.seq_id,
        )
    # All at once: they share a transaction. Whoever gives up then knows what was accepted.
    inputs: Sequence[SampledInput | None] = order.inputs or [None] * len(order.samples)
    sent = [
        _submit(server, order.tenant, sample, listener, sampled_input)
        for sample, sampled_input in zip(order.samples, inputs, strict=True)
    ]
    refused = [error for error in await asyncio.gather(*sent, return_exceptions=True) if error is not None]
    if refused:
        raise refused[0]


async def _judge(server: Server, order: SampleOrder, sample: SampleRequest) -> None:
    server.common.settings.operation_limits.check_sample(size_of(sample, sample.sampling_params.max_tokens or 0))
    await server.accounts.quotas.take_sample(order.tenant, is_background=order.is_background)


async def give_up(server: Server, order: SampleOrder) -> None:
    """Cancel what will not be delivered, unless somebody can ask for it again."""
    for request_id in () if order.is_repeatable else order.request_ids:
        with suppress(StorageUnavailable, NotFound):
            await server.common.sql.run(server.artifacts.sampling_sessions.cancel, request_id, order.tenant)


async def outcome(server: Server, request: Request, tenant: str, request_id: str, silence: Silence) -> SampleResult:
    """Wait for the result of one operation.

    Raises:
        ClientDisconnect: Nobody waits for it any more.
        TransientError: It takes too long, or the server is about to stop.
        TwinkleError: It failed.
    """
    loop = asyncio.get_running_loop()
    while True:
        looked_at = loop.time()
        owned = await server.queue.futures.wait(request_id, tenant, _LOOK_S)
        if owned.status.state.is_final:
            return await sample_result(request, server, owned.status)
        if loop.time() - looked_at < _LOOK_S / 2:
            raise TransientError("the server is about to stop; send the request again")
        if await request.is_disconnected():
            raise ClientDisconnect
        if silence.is_over:
            reason = await server.queue.meshes.why_waiting(owned.mesh)
            raise TransientError(reason or f"the sample has not ended within {_LONGEST_WAIT_S:.0f} s; send it again")


async def session_of_request(server: Server, request: Request, tenant: str) -> DrawSession:
    """The session of the caller's that a request names, else the one of all the tenant's OpenAI requests."""
    named = request.headers.get(SESSION_HEADER)
    return await shared_session(server, tenant) if named is None else await session_named(server, tenant, named)


async def shared_session(server: Server, tenant: str) -> DrawSession:
    """The one of all the tenant's samples that come without a session."""
    return DrawSession(await server.common.sql.run(server.accounts.sessions.open, tenant, _new_session()), 0)


async def session_named(server: Server, tenant: str, session_id: str) -> DrawSession:
    """One of the caller's sessions; ``NotFound`` if there is none of this id."""
    found = await server.common.sql.run(server.accounts.sessions.find, tenant, session_id)
    return DrawSession(found.id, priority_of(found.user_metadata))


async def lane_of(
    server: Server, tenant: str, session: DrawSession, model: ServedModel, *, repeated_seq: int | None
) -> str:
    """The sampling session of what the model's name means now, or of what it meant when this was asked before."""
    meant = model.checkpoint
    if meant is not None and repeated_seq is not None:
        before = await server.common.sql.run(
            server.artifacts.sampling_sessions.sampled_before, session.id, checkpoint=meant.path, seq=repeated_seq
        )
        if before is not None:
            return before
    bound_to = () if meant is None else (meant.content, str(meant.generation))
    lane = str(SamplingSessionId(session.id, number_of(model.mesh, model.name, *bound_to)))
    try:
        await server.common.sql.run(server.artifacts.sampling_sessions.find, lane, tenant=tenant)
    except NotFound:
        await server.accounts.resends.take_sampler(tenant, lane)
        await server.queue.submitter.open_lane(
            NewSamplingSession(
                id=lane,
                tenant=tenant,
                session=session.id,
                mesh=model.mesh,
                base_model=model.base_model,
                model_path=None if meant is None else meant.path,
                checkpoint=None if meant is None else meant.path,
                content=None if meant is None else meant.content,
                generation=0 if meant is None else meant.generation,
                priority=session.priority,
            )
        )
    return lane


def _sample(drawing: Drawing, lane: str, seq: int, end_texts: Sequence[str]) -> SampleRequest:
    # Given stop texts, a sample no longer stops at the model's own end by itself.
    stop = [*drawing.stops, *end_texts] if drawing.stops else None
    try:
        return SampleRequest(
            prompt=drawing.prompt(),
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


async def _submit(
    server: Server, tenant: str, sample: SampleRequest, listener: Listener | None, sampled_input: SampledInput | None
) -> None:
    params = sample.sampling_params
    if params.seed is None:
        params = params.model_copy(update={"seed": secrets.randbits(_SEED_BITS)})
    added = {"sampling_params": params, "listener": listener, "sampled_input": sampled_input}
    kept = ListenedSample.model_validate({**dict(sample), **added})
    num_prompt_tokens = sample.num_prompt_tokens
    assert sample.sampling_session_id is not None and sample.seq_id is not None
    await server.queue.submitter.submit(
        Submission(
            tenant=tenant,
            lane=sample.sampling_session_id,
            seq=sample.seq_id,
            kind=OperationKind.SAMPLE,
            # Of what was asked. How the answer is delivered is no part of it: a repeat may want it otherwise.
            digest=body_digest(sample),
            payload=Payload(inline=canonical_json(kept)),
            num_tokens=num_prompt_tokens + sample.num_samples * (params.max_tokens or 0),
            num_prompt_tokens=num_prompt_tokens,
            num_sequences=sample.num_samples,
        )
    )


async def sample_result(request: Request, server: Server, status: FutureStatus) -> SampleResult:
    """What a sample that has ended gave; it counts as held until the request is answered.

    Raises:
        Overloaded: Others of the tenant's hold too much for too long.
        Expired: It was kept for its time.
        TwinkleError: It failed.
    """
    if status.expired:
        raise Expired(status.why_expired(server.common.settings.result_ttl_s))
    if status.failure is not None:
        if status.failure.code == Cancelled.code:
            raise Cancelled(status.failure.message)
        kind = UserError if status.failure.category is FailureCategory.USER else TwinkleError
        raise kind(status.failure.message)
    assert status.result is not None, "a final future has a result or a failure"
    patience_s = server.common.settings.long_poll_s
    size_bytes = status.result.size_bytes
    hold = await server.common.results.hold_whole(request, size_bytes, patience_s=patience_s)
    data = status.result.inline
    if data is None:
        data = await server.common.object_io.run(read_payload, server.artifacts.blobs, status.result)
    result = decode_sample_response(data)
    largest = max((sequence.size_bytes for sequence in result.sequences), default=0)
    hold.write_in_parts(size_bytes, max(largest, result.prompt_bytes))
    return result


def _new_session() -> NewSession:
    """The one session of a tenant's OpenAI requests: its idempotency key makes it the same every time."""
    return NewSession(tags=["openai"], sdk_version="openai", idempotency_key=_SESSION_KEY)


def number_of(*parts: str) -> int:
    """A number of 62 bits drawn from texts: the same texts give the same number in every process."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2
