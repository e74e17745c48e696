"""One poll for many futures of any kind: a client that waits for thousands holds a few connections, not thousands."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.server.openapi import described
from twinkle.server.state import Common, Queue, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.storage.journal.journal import OwnedStatus
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.native import CollectedFuture, CollectRequest, CollectResponse

# Small results come along up to this sum; the others are there in the next answer.
_MAX_ANSWER_BYTES = 4 * 2**20

router = APIRouter()


@router.post("/futures/collect", openapi_extra=described(CollectResponse, body=CollectRequest))
async def collect(request: Request, common: Common, queue: Queue, tenant: Tenant) -> Response:
    """What has ended among some futures; waits until there is something. Outcomes are kept."""
    body = parse_body(CollectRequest, await common.bodies.read(request))
    timeout_s = min(body.timeout_s, common.settings.long_poll_s)
    statuses = await queue.futures.wait_any(body.request_ids, tenant, timeout_s)
    return answer(CollectResponse(ended=_ended(statuses)))


def _ended(statuses: dict[str, OwnedStatus | None]) -> list[CollectedFuture]:
    ended: list[CollectedFuture] = []
    size_bytes = 0
    for request_id, owned in statuses.items():
        if owned is not None and not owned.status.state.is_final:
            continue
        if size_bytes > _MAX_ANSWER_BYTES:
            break
        future = _describe(request_id, owned)
        size_bytes += len(future.result or b"")
        ended.append(future)
    return ended


def _describe(request_id: str, owned: OwnedStatus | None) -> CollectedFuture:
    if owned is None:
        return CollectedFuture(request_id=request_id, state="unknown")
    status = owned.status
    if status.expired:
        return CollectedFuture(request_id=request_id, state="expired", kind=status.kind)
    if status.failure is not None:
        return CollectedFuture(
            request_id=request_id,
            state="failed",
            kind=status.kind,
            error=status.failure.message,
            category=status.failure.category.value,
            code=status.failure.code,
        )
    assert status.result is not None, "a final future has a result or a failure"
    return CollectedFuture(request_id=request_id, state="done", kind=status.kind, result=status.result.inline)
