"""The header that makes a repeated request the same request."""

from __future__ import annotations

from fastapi import Request

from twinkle.core.errors import InvalidInput

HEADER = "X-Idempotency-Key"
MAX_KEY_LENGTH = 256


def idempotency_key(request: Request, header: str = HEADER) -> str | None:
    """The key that a request came with, if any.

    Raises:
        InvalidInput: It is too long. Cut off it could be another request's.
    """
    key = request.headers.get(header)
    if key and len(key) > MAX_KEY_LENGTH:
        raise InvalidInput(header, f"has {len(key)} characters, at most {MAX_KEY_LENGTH} are kept; send a shorter one")
    return key or None
