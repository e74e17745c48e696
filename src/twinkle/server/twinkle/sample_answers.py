"""What a call of ``sample`` is answered, at once or when somebody asks for it later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from twinkle.core.errors import Expired, NotFound, TwinkleError
from twinkle.core.operation import FutureStatus
from twinkle.scheduler.token_stream import ListenedSample, SampledInput
from twinkle.server.answering.results import answer_in_parts
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.ordering import Silence, give_up, outcome, sample_result, submit
from twinkle.server.state import ServerState
from twinkle.server.twinkle.asking import Asked
from twinkle.server.twinkle.calls import final_now, preferred_wait_s, ticket, until_final
from twinkle.server.twinkle.sampled import sampled
from twinkle.storage.payloads import read_payload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.sample_result import SampleResult


async def answer_asked(request: Request, server: ServerState, tenant: str, asked: Asked) -> Response:
    """Submit what is asked for, and answer with all samples, or with a ticket if that is preferred.

    Raises:
        ClientDisconnect: Nobody waits for it any more.
        TwinkleError: It was not accepted, or failed, or cannot be waited for here any longer.
    """
    patience_s = preferred_wait_s(request)
    if patience_s is not None:
        await submit(server, asked.order)
        first = asked.order.request_ids[0]
        if patience_s == 0:
            # Also where the outcome is quicker, as of every other call: who prefers a ticket reads one.
            return ticket(first)
        statuses = await _until_all_final(request, server, tenant, asked.order.request_ids, timeout_s=patience_s)
        return ticket(first) if statuses is None else await _answer(request, server, statuses, asked.inputs)
    silence = Silence()
    try:
        await submit(server, asked.order)
        results = [
            await outcome(server, request, tenant, request_id, silence) for request_id in asked.order.request_ids
        ]
    except (TwinkleError, ClientDisconnect):
        await give_up(server, asked.order)
        raise
    return await _written(server, results, asked.inputs)


async def later_samples(
    request: Request, server: ServerState, tenant: str, request_id: str, *, wait_s: float
) -> Response | None:
    """What a call of ``sample`` would have answered, by the id of its ticket; ``None`` while it is under way.

    Raises:
        NotFound: There is no such call of this dialect, or it is another tenant's.
        Expired: It was kept for its time.
        TwinkleError: It failed.
    """
    first = await _input_of(server, tenant, request_id)
    request_ids = [request_id, *first.others]
    statuses = await _until_all_final(request, server, tenant, request_ids, timeout_s=wait_s)
    if statuses is None:
        return None
    inputs = [first, *[await _input_of(server, tenant, other) for other in first.others]]
    return await _answer(request, server, statuses, inputs)


async def _until_all_final(
    request: Request, server: ServerState, tenant: str, request_ids: Sequence[str], *, timeout_s: float
) -> list[FutureStatus] | None:
    """How all of them ended; ``None`` when the time is up first."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + timeout_s
    statuses = []
    for request_id in request_ids:
        status = await final_now(server, tenant, request_id)
        left_s = ends_at - loop.time()
        if status is None and left_s > 0:
            status = await until_final(request, server, tenant, request_id, timeout_s=left_s)
        if status is None:
            return None
        statuses.append(status)
    return statuses


async def _input_of(server: ServerState, tenant: str, request_id: str) -> SampledInput:
    sessions = server.artifacts.sampling_sessions
    payload = await server.common.sql.run(partial(sessions.request, request_id, tenant=tenant))
    if payload.is_gone:
        raise Expired(f"the result of {request_id} was kept for its time and is gone")

    def read() -> SampledInput | None:
        return parse_body(ListenedSample, read_payload(server.artifacts.blobs, payload)).sampled_input

    kept = await server.common.object_io.run(read)
    if kept is None:
        raise NotFound(f"no call {request_id!r}")
    return kept


async def _answer(
    request: Request, server: ServerState, statuses: Sequence[FutureStatus], inputs: Sequence[SampledInput]
) -> Response:
    results = [await sample_result(request, server, status) for status in statuses]
    return await _written(server, results, inputs)


async def _written(server: ServerState, results: Sequence[SampleResult], inputs: Sequence[SampledInput]) -> Response:
    tokenizer_path = inputs[0].tokenizer_path
    text_model = await server.common.object_io.run(server.artifacts.texts.of, tokenizer_path)

    pieces = _pieces(results, inputs, text_model)
    return await answer_in_parts(
        server.common.object_io, pieces, result_bytes=sum(result.size_bytes for result in results)
    )


def _pieces(
    results: Sequence[SampleResult], inputs: Sequence[SampledInput], text_model: TextModel | None
) -> Iterator[bytes]:
    """A :class:`TwinkleSamples` as JSON."""
    yield b'{"samples":['
    for number, (result, one) in enumerate(zip(results, inputs, strict=True)):
        yield b"," if number else b""
        yield from sampled(result, one.row, text_model, is_scored_only=one.is_scored_only)
    yield b'],"checkpoint":' + orjson.dumps(inputs[0].checkpoint) + b"}"
