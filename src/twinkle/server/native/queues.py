"""Futures and queues: one poll for many futures of any kind, and where operations stand.

A client that waits for thousands holds a few connections, not thousands. An owner asks about one future, an
administrator about a mesh.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import NotFound
from twinkle.scheduler.overview import overview_of
from twinkle.scheduler.standing import describe
from twinkle.server.openapi import Access, described
from twinkle.server.state import Accounts, Artifacts, Common, Queue, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.storage.journal.answers import OwnedStatus
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.native import (
    CancelledSamplesResponse,
    CollectedFuture,
    CollectRequest,
    CollectResponse,
    MeshQueueResponse,
    PlaceInLine,
    StandingResponse,
    TenantInLine,
)

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


@router.post("/sessions/{session_id}/cancel_samples", openapi_extra=described(CancelledSamplesResponse, refusals=[404]))
async def cancel_samples(
    session_id: str, common: Common, accounts: Accounts, queue: Queue, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """End all samples of a session that nobody wants any more. Those that have ended keep their outcomes."""
    session = await common.sql.run(accounts.sessions.find, tenant, session_id)
    ended = await common.sql.run(artifacts.sampling_sessions.cancel_all, session.id, tenant)
    queue.futures.notify(ended)
    queue.lane_polls.notify(ended)
    return answer(CancelledSamplesResponse(num_cancelled=len(ended)))


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
        return CollectedFuture(
            request_id=request_id,
            state="expired",
            kind=status.kind,
            error=None if status.failure is None else status.failure.message,
        )
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


ADMIN_HEADER = "x-admin-key"


@router.get("/futures/{request_id}", openapi_extra=described(StandingResponse, refusals=[404]))
async def show_standing(request_id: str, common: Common, queue: Queue, tenant: Tenant) -> Response:
    """Where one of the caller's operations stands, why it waits, and when it may start."""
    standing = await queue.queue_board.standing(request_id, tenant)
    place = standing.place
    return answer(
        StandingResponse(
            request_id=standing.request_id,
            kind=standing.kind,
            state=standing.state,
            mesh=standing.mesh,
            model_id=standing.lane,
            seq_id=standing.seq,
            reason=standing.reason,
            text=describe(standing, now=common.clock.now()),
            waits_for_seq=standing.waits_for_seq,
            place=None if place is None else PlaceInLine(**asdict(place)),
            starts_in_s=standing.starts_in_s,
            attempt=standing.attempt,
            max_attempts=standing.max_attempts,
            last_error=standing.last_error,
            next_try_at=standing.next_try_at,
            accepted_at=standing.accepted_at,
        )
    )


@router.get("/meshes/{mesh}/queue", openapi_extra=described(MeshQueueResponse, access=Access.ADMINISTRATOR))
async def show_mesh_queue(mesh: str, request: Request, common: Common, queue: Queue) -> Response:
    """All tenants' lines on a mesh; for who holds the administrator's key, and for nobody where there is none."""
    _check_admin(common, request.headers.get(ADMIN_HEADER))
    if await queue.meshes.find(mesh) is None:
        raise NotFound(f"no mesh {mesh!r}")
    lines = await common.sql.run(queue.queues.look, mesh)
    overview = overview_of(lines, now=common.clock.now())
    return answer(
        MeshQueueResponse(
            mesh=overview.mesh,
            training_tokens_per_s=overview.training_rate,
            sampling_tokens_per_s=overview.sampling_rate,
            is_exact=overview.is_exact,
            tenants=[TenantInLine(**asdict(line)) for line in overview.tenants],
        )
    )


def _check_admin(common: Common, key: str | None) -> None:
    wanted = common.settings.admin_key.get_secret_value()
    if not wanted or not secrets.compare_digest((key or "").encode(), wanted.encode()):
        raise NotFound("no such route, or not for you")
