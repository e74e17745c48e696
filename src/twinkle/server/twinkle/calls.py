"""From a call to its answer: the one write path, the wait for the outcome, and the bytes of the result as they are.

A call is an operation like any other, so a client that goes away loses nothing: the operation goes on, the next call
comes behind it, and a resend under the same idempotency key finds its outcome.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import MappingProxyType

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from twinkle.core.errors import Expired, NotFound, StorageUnavailable, TransientError
from twinkle.core.operation import Failure, FailureCategory, FutureStatus, OperationKind, Unnumbered
from twinkle.server.answering.results import result_response
from twinkle.server.errors import JSON, refusal
from twinkle.server.state import ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.twinkle.adapters import created_answer
from twinkle.wire.bodies.twinkle_calls import AdapterRemoved, CallTicket

PREFER = "Prefer"
ACCEPTED = 202
# Between two looks the client may have hung up.
_LOOK_S = 5.0
_SHORTEST_LOOK_S = 0.5
_LONGEST_WAIT_S = 600.0
_STORAGE_PATIENCE_S = 30.0
_STORAGE_PAUSE_S = 1.0
_WAIT = re.compile(r"wait\s*=\s*\"?([0-9]{1,6})\"?")
# What a user's mistake is answered with, where it is not 400.
_STATUS_OF_CODE: Mapping[str, int] = MappingProxyType({NotFound.code: 404, "exhausted": 410})


class StillRunning(TransientError):
    """A call that goes on although its answer is not waited for any longer."""

    code = "still_running"


async def answer_call(request: Request, server: ServerState, call: Unnumbered) -> Response:
    """Accept a call as its lane's next operation and answer with its outcome, or with a ticket if that is preferred.

    Raises:
        UserError: It was not accepted.
        TransientError: It was not accepted, or its outcome cannot be waited for here any longer.
        ClientDisconnect: Nobody waits for it any more.
    """
    accepted = await server.queue.submitter.submit(call)
    return await answer_accepted(request, server, call.tenant, accepted.request_id)


async def answer_accepted(request: Request, server: ServerState, tenant: str, request_id: str) -> Response:
    """Answer an accepted operation as :func:`answer_call` does."""
    patience_s = preferred_wait_s(request)
    if patience_s == 0:
        return ticket(request_id)
    status = await until_final(request, server, tenant, request_id, timeout_s=patience_s)
    if status is not None:
        return await outcome_of(request, server, status)
    if patience_s is not None:
        return ticket(request_id)
    raise StillRunning(
        f"{request_id} goes on and is not waited for here any longer; ask GET /api/v1/twinkle/futures/{request_id} for"
        " its outcome, or send the call again with the same x-idempotency-key"
    )


def preferred_wait_s(request: Request) -> float | None:
    """How long to wait before a ticket is answered (RFC 7240, 4.1 and 4.3); ``None``: until there is an outcome."""
    preferences = request.headers.get(PREFER, "").lower()
    if "respond-async" not in preferences:
        return None
    wait = _WAIT.search(preferences)
    return 0.0 if wait is None else min(float(wait[1]), _LONGEST_WAIT_S)


def ticket(request_id: str) -> Response:
    """The answer to a call that is under way."""
    response = answer(CallTicket(request_id=request_id), status=ACCEPTED)
    response.headers["Preference-Applied"] = "respond-async"
    return response


async def until_final(
    request: Request, server: ServerState, tenant: str, request_id: str, *, timeout_s: float | None
) -> FutureStatus | None:
    """The outcome of an operation; ``None`` when the time is up first, or the server is about to stop.

    Raises:
        ClientDisconnect: Nobody waits for it any more.
        NotFound: There is no such operation, or it is another tenant's.
        StorageUnavailable: The journal could not be read for long.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + (_LONGEST_WAIT_S if timeout_s is None else timeout_s)
    read_at = loop.time()
    while True:
        looked_at = loop.time()
        look_s = min(_LOOK_S, max(ends_at - looked_at, _SHORTEST_LOOK_S))
        try:
            owned = await server.queue.futures.wait(request_id, tenant, look_s)
        except StorageUnavailable:
            if loop.time() - read_at > _STORAGE_PATIENCE_S:
                raise
            await asyncio.sleep(_STORAGE_PAUSE_S)
        else:
            if owned.status.state.is_final:
                return owned.status
            read_at = loop.time()
            is_released = read_at - looked_at < look_s / 2
            if is_released or read_at >= ends_at:
                return None
        if await request.is_disconnected():
            raise ClientDisconnect


async def final_now(server: ServerState, tenant: str, request_id: str) -> FutureStatus | None:
    """The outcome of an operation if there is one by now.

    Raises:
        NotFound: There is no such operation, or it is another tenant's.
    """
    owned = (await server.common.sql.run(server.queue.journal.statuses, [request_id])).get(request_id)
    if owned is None or owned.tenant != tenant:
        raise NotFound(f"no call {request_id!r}")
    return owned.status if owned.status.state.is_final else None


async def outcome_of(request: Request, server: ServerState, status: FutureStatus) -> Response:
    """What a call is answered when it has ended.

    Raises:
        Expired: Its result was kept for its time.
    """
    if status.expired:
        raise Expired(status.why_expired(server.common.settings.result_ttl_s))
    if status.failure is not None:
        return _failed(status.failure)
    if status.kind is OperationKind.CREATE_MODEL:
        return await created_answer(server, status.lane)
    if status.kind is OperationKind.UNLOAD_MODEL:
        return answer(AdapterRemoved(training_run_id=status.lane))
    assert status.result is not None, "a final future has a result or a failure"
    server.common.results.hold_streamed(request, status.result.size_bytes)
    return await result_response(server.common.object_io, server.artifacts.blobs, status.result, media_type=JSON)


def _failed(failure: Failure) -> Response:
    if failure.category is FailureCategory.USER:
        return refusal(_STATUS_OF_CODE.get(failure.code, 400), failure.message, failure.code)
    return refusal(500, failure.message, failure.code)
