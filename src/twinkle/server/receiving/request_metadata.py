"""What a request says of itself beside its fields: the header that makes a repeated one the same, and its priority."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request

from twinkle.core.errors import InvalidInput

HEADER = "X-Idempotency-Key"
SESSION_HEADER = "X-Session-Id"
MAX_KEY_LENGTH = 256
PRIORITY_KEY = "twinkle_priority"
MAX_PRIORITY = 100


def idempotency_key(request: Request, header: str = HEADER) -> str | None:
    """The key that a request came with, if any.

    Raises:
        InvalidInput: It is too long. Cut off it could be another request's.
    """
    key = request.headers.get(header)
    if key and len(key) > MAX_KEY_LENGTH:
        raise InvalidInput(header, f"has {len(key)} characters, at most {MAX_KEY_LENGTH} are kept; send a shorter one")
    return key or None


def priority_of(*metadata: Mapping[str, str] | None) -> int:
    """The priority in the first of these that has one, else 0; the highest goes first.

    Raises:
        InvalidInput: It is no whole number, or out of range.
    """
    for values in metadata:
        text = (values or {}).get(PRIORITY_KEY)
        if text is None:
            continue
        try:
            priority = int(text)
        except ValueError:
            priority = MAX_PRIORITY + 1
        if abs(priority) > MAX_PRIORITY:
            raise InvalidInput(
                f"user_metadata.{PRIORITY_KEY}",
                f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, not {text[:40]!r}",
            )
        return priority
    return 0
