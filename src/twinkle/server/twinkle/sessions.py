"""Which session a request of the Twinkle dialect belongs to."""

from __future__ import annotations

from fastapi import Request

from twinkle.core.errors import Expired, InvalidInput, NotFound
from twinkle.server.state import ServerState
from twinkle.storage.tenants.sessions import NewSession

SESSION_HEADER = "X-Twinkle-Session-Id"
REQUEST_HEADER = "X-Request-Id"
_SDK = "twinkle"
_MAX_KEY_LENGTH = 200


async def session_of(request: Request, server: ServerState, tenant: str) -> str:
    """The session that a request names, or the one that belongs to the id which a client sends with all its requests.

    That id is the process's own, and stays the same: whoever opens no session has one for each process. Its requests
    are its signs of life.

    Raises:
        NotFound: The named session is not the tenant's.
        Expired: It was finished.
        InvalidInput: Neither was sent.
    """
    named = request.headers.get(SESSION_HEADER)
    if named:
        try:
            session = await server.common.sql.run(server.accounts.sessions.find, tenant, named)
        except NotFound:
            raise NotFound("Unknown session") from None
        if session.finished_at is not None:
            raise Expired(f"session {named} was finished")
        return session.id
    request_id = request.headers.get(REQUEST_HEADER)
    if not request_id:
        raise InvalidInput(
            SESSION_HEADER, "is missing: open a session with POST /api/v1/twinkle/create_session and send its id"
        )
    if len(request_id) > _MAX_KEY_LENGTH:
        raise InvalidInput(REQUEST_HEADER, f"has more than {_MAX_KEY_LENGTH} characters")
    new = NewSession(sdk_version=_SDK, idempotency_key=f"request:{request_id}")
    opened = await server.accounts.resends.open_session(tenant, new)
    await server.common.sql.run(server.accounts.sessions.heartbeat, tenant, opened)
    return opened
