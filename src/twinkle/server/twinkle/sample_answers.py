"""What a call of ``sample`` is answered, at once or when somebody asks for it later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from twinkle.core.errors import Expired, NotFound, TwinkleError
from twinkle.core.operation import FutureStatus
from twinkle.data_format.continuation import Texts, continued_row
from twinkle.data_format.tool_calls import parse_tool_calls
from twinkle.scheduler.token_stream import ListenedSample, SampledInput
from twinkle.server.answering.results import answer_in_parts
from twinkle.server.model_texts import TextModel
from twinkle.server.openai.ordering import Silence, give_up, outcome, sample_result, submit
from twinkle.server.state import ServerState
from twinkle.server.twinkle.asking import Asked
from twinkle.server.twinkle.calls import final_now, preferred_wait_s, ticket, until_final
from twinkle.storage.payloads import read_payload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.twinkle_sampling import TwinkleSequence
from twinkle.wire.json_pieces import with_array
from twinkle.wire.sample_result import EMPTY_LOGPROB, SampleResult, TopkLogprobs, WireSequence

_Pairs = list[list[tuple[int, float]]]


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
        yield from _sampled(result, one.row, text_model, is_scored_only=one.is_scored_only)
    yield b'],"checkpoint":' + orjson.dumps(inputs[0].checkpoint) + b"}"


def _sampled(
    result: SampleResult, row: Mapping[str, Any], text_model: TextModel | None, *, is_scored_only: bool
) -> Iterator[bytes]:
    """What came of one input, a :class:`TwinkleSampled`, as pieces of JSON. Blocks for as long as decoding takes."""
    texts = _texts(text_model)
    sequences = (_sequence(sequence, row, texts, is_scored_only=is_scored_only) for sequence in result.sequences)
    yield from with_array({}, "sequences", sequences, _scores_of_prompt(result, row))


def _scores_of_prompt(result: SampleResult, row: Mapping[str, Any]) -> dict[str, object]:
    scores, topk = result.prompt_logprobs, result.topk_prompt_logprobs
    return {
        "prompt_token_ids": row["input_ids"],
        "prompt_logprobs": None if scores is None else [None, *scores[1:].tolist()],
        "topk_prompt_logprobs": None if topk is None else [None, *_pairs(topk)[1:]],
    }


def _sequence(sequence: WireSequence, row: Mapping[str, Any], texts: Texts, *, is_scored_only: bool) -> TwinkleSequence:
    # To score a prompt alone one token is drawn, which nobody has asked for.
    tokens: list[int] = [] if is_scored_only else sequence.tokens.tolist()
    return TwinkleSequence(
        stop_reason="length" if is_scored_only else sequence.stop_reason,
        tokens=tokens,
        logprobs=_logprobs(sequence, tokens),
        decoded=None if texts.decode is None else texts.decode(tokens),
        new_input_feature=continued_row(row, tokens, texts=texts),
    )


def _logprobs(sequence: WireSequence, tokens: Sequence[int]) -> _Pairs:
    """Of the chosen tokens, or of the likeliest where more were asked for; never nothing."""
    if sequence.topk is not None:
        return _pairs(sequence.topk)[: len(tokens)]
    scores: list[float] = sequence.logprobs.tolist()
    return [[pair] for pair in zip(tokens, scores[: len(tokens)], strict=True)]


def _pairs(top: TopkLogprobs) -> _Pairs:
    rows = zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    return [[pair for pair in zip(ids, scores, strict=True) if pair[1] > EMPTY_LOGPROB] for ids, scores in rows]


def _texts(text_model: TextModel | None) -> Texts:
    if text_model is None:
        return Texts()
    return Texts(decode=text_model.decode_all, read=text_model.decode, parse_tool_calls=parse_tool_calls)
