"""The caller's own key, the log of what was done with the account, and the search among its sessions."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Literal

from fastapi import APIRouter, Request, Response

from twinkle.server.access.auth import is_token
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Common, Key, Tenant
from twinkle.server.tinker.answers import NO_CONTENT, answer, moment
from twinkle.storage.adapters.adapters import NO_PROJECT
from twinkle.storage.tenants.audit import AuditRecord
from twinkle.storage.tenants.sessions import FoundSession
from twinkle.wire.bodies.account import (
    ActiveStatus,
    ApiKeyDetails,
    ApiKeyResponse,
    AuditEntry,
    AuditResponse,
    AuthTokenResponse,
    FinishedStatus,
    FinishReasonInfo,
    NextCursor,
    OrganizationDetails,
    SearchRequest,
    SearchResponse,
    SessionSummary,
    StatusQuery,
    UserDetails,
)
from twinkle.wire.bodies.base import parse_body

_DAY = timedelta(days=1)
_SEARCH = "sessions"

Status = ActiveStatus | FinishedStatus | None

router = APIRouter()


@router.get("/auth/apikey/me", openapi_extra=described(ApiKeyResponse))
async def show_key(common: Common, accounts: Accounts, key: Key) -> Response:
    """What may be told of the key that came with the request."""
    owner = await common.sql.run(accounts.tenants.name_of, key.tenant)
    details = ApiKeyDetails(org_details=OrganizationDetails(name=owner), user_details=UserDetails(email=owner))
    return answer(ApiKeyResponse(key_id=key.number, name=key.name, details=details))


@router.post("/auth/token", openapi_extra=described(AuthTokenResponse))
async def exchange_key(request: Request, common: Common, accounts: Accounts, key: Key) -> Response:
    """A token that stands for the key that came with the request. A token gets itself: none outlives its time."""
    credential = request.headers["x-api-key"]
    if is_token(credential):
        return answer(AuthTokenResponse(jwt=credential))
    organization = await common.sql.run(accounts.tenants.name_of, key.tenant)
    return answer(AuthTokenResponse(jwt=accounts.tokens.issue(key, organization=organization)))


@router.delete("/auth/apikey/me", openapi_extra=described(None))
async def revoke_key(common: Common, accounts: Accounts, key: Key) -> Response:
    """Revoke the key that came with the request, and no other; tokens that were exchanged for it end with it."""
    await common.sql.run(accounts.tenants.revoke_key, key.id)
    accounts.keys.forget(key)
    return Response(status_code=NO_CONTENT)


@router.get("/audit", openapi_extra=described(AuditResponse))
async def audit(
    common: Common,
    accounts: Accounts,
    tenant: Tenant,
    event_type: Literal["all", "checkpoints", "projects", "teams", "organizations"] = "all",
    day: date | None = None,
) -> Response:
    """What was done in one day, UTC."""
    of_day = day or moment(common.clock.now()).date()
    start = datetime(of_day.year, of_day.month, of_day.day, tzinfo=UTC).timestamp()
    end = start + _DAY.total_seconds()
    records = await common.listings.run(tenant, accounts.audit.entries, tenant, start=start, end=end)
    prefix = "" if event_type == "all" else f"{event_type.removesuffix('s')}_"
    return answer(AuditResponse(entries=[_entry(record) for record in records if record.event.startswith(prefix)]))


@router.post("/sessions/search", openapi_extra=described(SearchResponse, body=SearchRequest))
async def search_sessions(request: Request, common: Common, accounts: Accounts, tenant: Tenant) -> Response:
    """The tenant's sessions that match, newest first."""
    body = parse_body(SearchRequest, await common.bodies.read(request))
    after = None if body.cursor is None else accounts.cursors.read(tenant, _SEARCH, body.cursor.last_session_id)
    owner = await common.sql.run(accounts.tenants.name_of, tenant)
    if body.owner.type == "user" and owner not in (body.owner.owner_urns or ()):
        return answer(SearchResponse(sessions=[]))
    found = await common.listings.run(
        tenant,
        accounts.sessions.search,
        tenant,
        lambda session: _matches(session, body, _status_of(common, session)),
        limit=body.limit,
        after=after,
    )
    page, last = found.sessions, found.goes_on_behind
    cursor = None
    if last is not None:
        text = accounts.cursors.write(tenant, _SEARCH, last.created_at, last.id)
        cursor = NextCursor(last_created_at=moment(last.created_at), last_session_id=text)
    return answer(
        SearchResponse(
            sessions=[_summary(session, owner, _status_of(common, session)) for session in page], next_cursor=cursor
        )
    )


def _entry(record: AuditRecord) -> AuditEntry:
    return AuditEntry(
        timestamp=moment(record.at),
        event=record.event,
        event_details=record.details,
        model_id=record.details.get("training_run"),
        tinker_path=record.details.get("tinker_path"),
    )


def _matches(session: FoundSession, body: SearchRequest, status: Status) -> bool:
    if body.session_id is not None or body.display_name is not None:
        is_it = session.id == body.session_id
        if not is_it and not _is_named(session, body.display_name):
            return False
    if body.project_ids is not None and (session.project_id or NO_PROJECT) not in body.project_ids:
        return False
    metadata = session.user_metadata or {}
    if any(metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    return body.statuses is None or any(_is_in(status, query) for query in body.statuses)


def _is_named(session: FoundSession, words: str | None) -> bool:
    if words is None or session.display_name is None:
        return False
    return all(word in session.display_name.casefold() for word in words.casefold().split())


def _is_in(status: Status, query: StatusQuery) -> bool:
    if status is None or status.type != query.type:
        return False
    return isinstance(status, ActiveStatus) or query.reasons is None or status.reason.type in query.reasons


def _status_of(common: Common, session: FoundSession) -> Status:
    if session.finished_at is not None:
        return FinishedStatus(reason=FinishReasonInfo(type=session.finish_reason or ""), detail=session.finish_detail)
    silent_s = common.clock.now() - session.heartbeat_at
    return ActiveStatus() if silent_s <= common.settings.session_timeout_s else None


def _summary(session: FoundSession, owner: str, status: Status) -> SessionSummary:
    return SessionSummary(
        session_id=session.id,
        created_at=moment(session.created_at),
        owner=owner,
        project_id=session.project_id or NO_PROJECT,
        status=status,
        checkpoints_count=session.num_checkpoints,
        display_name=session.display_name,
        user_metadata=session.user_metadata,
        checkpoint_storage_bytes=session.checkpoint_bytes,
    )
