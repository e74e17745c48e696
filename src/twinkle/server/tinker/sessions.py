"""Sessions: one client's presence."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.core.errors import Expired
from twinkle.server.access.acting import acting_in
from twinkle.server.connections.mounting import base_url_of
from twinkle.server.openapi import described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key, priority_of
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import NO_CONTENT, answer
from twinkle.storage.tenants.sessions import NewSession
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.session import (
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionProjectRequest,
    SessionResponse,
    SessionsResponse,
    TraceExportResponse,
)

MAX_PAGE = 1000
_MAX_RUNS_SHOWN = 10_000

Limit = Annotated[int, Query(ge=0, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, le=2**31 - 1)]

router = APIRouter()


@router.post(
    "/create_session",
    openapi_extra=described(CreateSessionResponse, body=CreateSessionRequest, headers=[HEADER]),
)
async def create_session(request: Request, common: Common, accounts: Accounts, tenant: Tenant) -> Response:
    """A new session; the same idempotency key gets the same one."""
    body = parse_body(CreateSessionRequest, await common.bodies.read(request))
    priority_of(body.user_metadata)
    acting = acting_in(request)
    new = NewSession(
        tags=body.tags,
        user_metadata=body.user_metadata,
        project_id=body.project_id,
        display_name=body.display_name,
        sdk_version=body.sdk_version,
        idempotency_key=idempotency_key(request),
        job=None if acting is None else acting.job,
    )
    session_id = await accounts.resends.open_session(tenant, new)
    return answer(CreateSessionResponse(session_id=session_id))


@router.post(
    "/session_heartbeat",
    openapi_extra=described(SessionHeartbeatResponse, body=SessionHeartbeatRequest, refusals=[404, 410]),
)
async def session_heartbeat(request: Request, common: Common, accounts: Accounts, tenant: Tenant) -> Response:
    """A sign of life; 410 ends the client's heartbeats."""
    body = parse_body(SessionHeartbeatRequest, await common.bodies.read(request))
    if not await common.sql.run(accounts.sessions.heartbeat, tenant, body.session_id):
        raise Expired(f"session {body.session_id} was finished")
    return answer(SessionHeartbeatResponse())


@router.post("/sessions/{session_id}/finish", openapi_extra=described(None, body=FinishSessionRequest, refusals=[404]))
async def finish_session(
    session_id: str, request: Request, common: Common, accounts: Accounts, tenant: Tenant
) -> Response:
    """How a client ended; the first report wins."""
    body = parse_body(FinishSessionRequest, await common.bodies.read(request))
    await common.sql.run(accounts.sessions.finish, tenant, session_id, reason=body.reason.type, detail=body.detail)
    return Response(status_code=NO_CONTENT)


@router.put("/sessions/{session_id}/project", openapi_extra=described(None, body=SessionProjectRequest, refusals=[404]))
async def set_project(
    session_id: str, request: Request, common: Common, accounts: Accounts, tenant: Tenant
) -> Response:
    """Put a session into a project."""
    body = parse_body(SessionProjectRequest, await common.bodies.read(request))
    await common.sql.run(accounts.sessions.set_project, tenant, session_id, body.project_id)
    return Response(status_code=NO_CONTENT)


@router.get("/sessions", openapi_extra=described(SessionsResponse))
async def list_sessions(
    common: Common, accounts: Accounts, tenant: Tenant, limit: Limit = 20, offset: Offset = 0
) -> Response:
    """The tenant's sessions, newest first."""
    ids = await common.listings.run(tenant, accounts.sessions.page, tenant, limit=limit, offset=offset)
    return answer(SessionsResponse(sessions=ids))


@router.get("/sessions/{session_id}", openapi_extra=described(SessionResponse, refusals=[404]))
async def show_session(
    session_id: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """One session and what came of it."""
    row = await common.sql.run(accounts.sessions.find, tenant, session_id)
    runs, _ = await common.listings.run(
        tenant, artifacts.adapters.page, tenant, limit=_MAX_RUNS_SHOWN, offset=0, session_id=session_id
    )
    samplers = await common.listings.run(tenant, artifacts.sampling_sessions.all_of, session_id)
    return answer(
        SessionResponse(
            training_run_ids=[run.id for run in runs],
            sampler_ids=samplers,
            user_metadata=row.user_metadata,
            display_name=row.display_name,
        )
    )


@router.get("/sessions/{session_id}/trace_export", openapi_extra=described(TraceExportResponse, refusals=[404]))
async def export_trace(
    session_id: str, request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """A URL, good for a while without a key, under which the session's timeline can be read as a Perfetto trace."""
    session = await common.sql.run(accounts.sessions.find, tenant, session_id)
    url = artifacts.links.trace_url_of(session.id, base_url=base_url_of(common.settings, request))
    return answer(TraceExportResponse(url=url))
