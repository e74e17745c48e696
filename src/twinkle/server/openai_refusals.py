"""An error in the form the ``openai`` client reads."""

from __future__ import annotations

import orjson
from typing_extensions import TypedDict

PREFIX = "/v1/"

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class OpenAIErrorInfo(TypedDict):
    """What was wrong, and with which parameter."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIRefusal(TypedDict):
    """Why a request was refused, as OpenAI says it."""

    error: OpenAIErrorInfo


def openai_error(status: int, message: str, code: str, param: str | None = None) -> bytes:
    """The body of a refusal: ``{"error": {"message", "type", "param", "code"}}``."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = OpenAIErrorInfo(message=message, type=kind, param=param, code=code)
    return orjson.dumps(OpenAIRefusal(error=error))
