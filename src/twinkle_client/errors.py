"""Everything this client raises on purpose: that of ``twinkle.client``, and what only this dialect has.

TwinkleError
├── UserError and those below it    refused, with the server's words: InvalidInput, NotFound, Conflict, LimitReached...
│   ├── RunClosed                   a call was not sent, as one before it could not be handed over
│   └── ClientClosed                the connection was closed
├── CallFailed                      the server tried and could not; ``status``, ``code``
├── BadAnswer                       what answered is no server of this dialect
├── Overloaded, Unavailable         tried again until the time for that was up
└── ConfigError                     no ``init_twinkle_client`` yet, a URL that is none, a key that cannot be sent

A call that takes longer than it may raises the built-in ``TimeoutError``; the server goes on with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from twinkle.client.errors import (
    BadAnswer,
    Cancelled,
    ClientClosed,
    ConfigError,
    Conflict,
    Expired,
    Forbidden,
    InvalidInput,
    LimitReached,
    NotFound,
    Overloaded,
    RunClosed,
    TooLarge,
    TransientError,
    TwinkleError,
    Unauthenticated,
    Unavailable,
    UserError,
    refusal_of,
)

__all__ = [
    "BadAnswer",
    "CallFailed",
    "Cancelled",
    "ClientClosed",
    "ConfigError",
    "Conflict",
    "Expired",
    "Forbidden",
    "InvalidInput",
    "LimitReached",
    "NotFound",
    "Overloaded",
    "RunClosed",
    "TooLarge",
    "TransientError",
    "TwinkleError",
    "Unauthenticated",
    "Unavailable",
    "UserError",
]

_TRACEBACK = "Traceback (most recent call last)"
_LONGEST_WORDS = 2000


class CallFailed(TwinkleError):
    """The server took a call and could not do it, which is the call's outcome."""

    def __init__(self, message: str, *, status: int, code: str = "") -> None:
        super().__init__(message, status=status)
        self.status = status
        self.code = code or "call_failed"


def error_of(response: httpx.Response) -> TwinkleError:
    """The error that a refusal or a failure is, in the server's words."""
    words, code = _read(response)
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        return CallFailed(words, status=response.status_code, code=code)
    error = refusal_of(response.status_code, code, words)
    if code:
        error.code = code
    return error


def words_of(response: httpx.Response) -> str:
    """What the server says in an answer that is none."""
    return _read(response)[0]


def _read(response: httpx.Response) -> tuple[str, str]:
    try:
        body = json.loads(response.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        # A proxy in between, whose page says nothing to a script.
        return f"{response.status_code} {response.reason_phrase} from {response.url.copy_with(query=None)}", ""
    code = body.get("code")
    return _words(body.get("detail", body.get("error", response.reason_phrase))), code if isinstance(code, str) else ""


def _words(detail: Any) -> str:
    if isinstance(detail, dict):
        return _words(detail.get("message", json.dumps(detail)))
    if isinstance(detail, Sequence) and not isinstance(detail, str):
        return "; ".join(_complaint(item) for item in detail)[:_LONGEST_WORDS]
    text = str(detail)
    if _TRACEBACK in text:
        # Another's server shows its insides; only its last line is meant for people.
        text = next((line for line in reversed(text.splitlines()) if line.strip()), text).strip()
    return text[:_LONGEST_WORDS]


def _complaint(item: Any) -> str:
    """One of a list of what is wrong with a body: where, and what."""
    if not isinstance(item, dict):
        return str(item)
    place = ".".join(str(part) for part in item.get("loc", ()) if part != "body")
    return f"{place}: {item.get('msg', 'is wrong')}" if place else str(item.get("msg", item))
