"""Bodies about the caller: the key, the audit log, the search among sessions."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import Field

from twinkle.wire.bodies.base import MAX_METADATA_ENTRIES, Identifier, RequestBody, ResponseBody, Text

# Of each kind of thing that a search names.
MAX_SEARCHED = 1000

FinishType: TypeAlias = Literal["success", "errored", "interrupted"]


class OrganizationDetails(ResponseBody):
    """The tenant."""

    name: str


class UserDetails(ResponseBody):
    """The tenant again: nobody has an address here."""

    email: str


class ApiKeyDetails(ResponseBody):
    """Whom a key belongs to."""

    org_details: OrganizationDetails
    user_details: UserDetails


class ApiKeyResponse(ResponseBody):
    """``GET auth/apikey/me``."""

    key_id: int
    name: str
    note: str = ""
    details: ApiKeyDetails


class AuthTokenResponse(ResponseBody):
    """``POST auth/token``."""

    jwt: str


class AuditEntry(ResponseBody):
    """Something that happened; ``event`` is ``<resource>_<action>``."""

    timestamp: datetime
    event: str
    event_details: dict[str, str]
    model_id: str | None = None
    tinker_path: str | None = None


class AuditResponse(ResponseBody):
    """``GET audit``."""

    entries: list[AuditEntry]


class SearchOwner(RequestBody):
    """Whose sessions; whatever is asked, only the caller's are found."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] | None = Field(default=None, max_length=MAX_SEARCHED)


class StatusQuery(RequestBody):
    """How a session ended, or that it has not."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[FinishType] | None = Field(default=None, max_length=MAX_SEARCHED)


class SearchCursor(RequestBody):
    """Where the next page starts. All of it is in ``last_session_id``, which is no session's id but opaque."""

    last_session_id: str


class SearchRequest(RequestBody):
    """``POST sessions/search``. A session matches either its id or its name, and everything else that is given."""

    session_id: Identifier | None = None
    display_name: Text | None = None
    project_ids: list[Text] | None = Field(default=None, max_length=MAX_SEARCHED)
    user_metadata: dict[Text, Text] = Field(default={}, max_length=MAX_METADATA_ENTRIES)
    owner: SearchOwner = SearchOwner()
    statuses: list[StatusQuery] | None = Field(default=None, max_length=MAX_SEARCHED)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None


class ActiveStatus(ResponseBody):
    """Its client gives signs of life."""

    type: Literal["active"] = "active"


class FinishReasonInfo(ResponseBody):
    """What its client said at the end."""

    type: str


class FinishedStatus(ResponseBody):
    """Its client said goodbye."""

    reason: FinishReasonInfo
    detail: str | None = None
    type: Literal["client_finished"] = "client_finished"


class SessionSummary(ResponseBody):
    """A session that was found; without a status it has lapsed."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: ActiveStatus | FinishedStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int


class NextCursor(ResponseBody):
    """What the next request brings as ``cursor``; to its reader ``last_session_id`` means nothing."""

    last_created_at: datetime
    last_session_id: str


class SearchResponse(ResponseBody):
    """One page, newest first."""

    sessions: list[SessionSummary]
    next_cursor: NextCursor | None = None
