"""Identifiers. The Tinker SDK computes some of these forms itself, so they are part of the contract."""

from __future__ import annotations

import secrets
import uuid

API_KEY_PREFIX = "tml-"
ACCESS_TOKEN_PREFIX = "wat-"


def new_id() -> str:
    """An opaque id: 32 hexadecimal digits, unguessable."""
    return uuid.uuid4().hex


def new_session_id() -> str:
    """A session's id: a UUID in its usual form (never a ``/`` nor a ``:``)."""
    return str(uuid.uuid4())


def new_api_key() -> str:
    """A key of 256 random bits behind the prefix the SDK insists on."""
    return API_KEY_PREFIX + secrets.token_urlsafe(32)


def new_access_token() -> str:
    """A weights access token of 256 random bits; its prefix is not an API key's."""
    return ACCESS_TOKEN_PREFIX + secrets.token_urlsafe(32)


def request_id_of(lane: str, seq: int) -> str:
    """The future of operation ``seq`` of a lane: the same for every resend."""
    return f"{lane}:req:{seq}"
