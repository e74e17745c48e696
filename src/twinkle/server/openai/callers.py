"""Who calls, and which session their samples belong to."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import Depends, Request

from twinkle.server.state import Accounts
from twinkle.storage.tenants.directory import NewSession

_SESSION_KEY = "openai"
_BEARER = "bearer "


async def _caller(request: Request, accounts: Accounts) -> str:
    authorization = request.headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :].strip() if authorization.lower().startswith(_BEARER) else None
    return await accounts.keys.tenant_of(bearer or request.headers.get("x-api-key"))


Caller = Annotated[str, Depends(_caller)]
"""The tenant whose key came as a bearer token or in X-API-Key; 401 without one."""


def new_openai_session() -> NewSession:
    """The one session of a tenant's OpenAI requests: its idempotency key makes it the same every time."""
    return NewSession(
        tags=["openai"],
        user_metadata=None,
        project_id=None,
        display_name=None,
        sdk_version="openai",
        idempotency_key=_SESSION_KEY,
    )


def number_of(*parts: str) -> int:
    """A number of 62 bits drawn from texts: the same texts give the same number in every process."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2
