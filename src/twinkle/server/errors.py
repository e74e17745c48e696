"""The one table from our errors to HTTP, and the form every refusal has: ``{"detail": ..., "code": ...}``.

On the routes of OpenAI's clients it is OpenAI's form instead.

Always a JSON body with its length: the Tinker SDK takes an empty or chunked 400 for an outage and retries for minutes.
Never 409, which it retries too.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping

import orjson
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from twinkle.core.errors import (
    Conflict,
    Expired,
    Forbidden,
    InvalidInput,
    InvalidToken,
    MeshUnavailable,
    NotFound,
    Overloaded,
    StatementFailed,
    StorageUnavailable,
    TooLarge,
    TransientError,
    TwinkleError,
    Unauthenticated,
    UserError,
)
from twinkle.core.ids import new_id
from twinkle.wire.bodies.base import complaint

_OPENAI_PATHS = ("/v1/", "/api/v1/chat/", "/api/v1/models")
"""Where OpenAI's clients ask, those of Twinkle's server too."""

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


JSON = "application/json"

_STATUS: dict[type[TwinkleError], int] = {
    Unauthenticated: 401,
    Forbidden: 403,
    InvalidInput: 400,
    NotFound: 404,
    Conflict: 400,
    TooLarge: 413,
    Expired: 410,
    UserError: 400,
    Overloaded: 429,
    MeshUnavailable: 503,
    StorageUnavailable: 503,
    TransientError: 503,
    TwinkleError: 500,
}
# What these say names hosts and folders of ours: it goes to the log, this to the client.
_PUBLIC_TEXT: dict[type[TwinkleError], str] = {
    StorageUnavailable: "the server's storage does not answer right now; nothing was accepted, send it again",
}
_CODE_OF_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 422: "invalid_input"}
_RETRY_AFTER_S = 1
# RFC 6750, 3.1. The SDK then exchanges its key for a new token and sends the request once more.
_EXCHANGE_AGAIN = 'Bearer error="invalid_token"'
# The SDK polls a future again at once after a 5xx, without limit.
_HOT_LOOP_PATH = "/retrieve_future"
_HOT_LOOP_PAUSE_S = 1.0

_log = structlog.get_logger()


class Refusal(TypedDict):
    """Why a request was refused, in words and as a code that stays the same."""

    detail: str
    code: str


def refusal(status: int, detail: str, code: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the client sees it."""
    body = Refusal(detail=detail, code=code)
    return Response(orjson.dumps(body), status_code=status, media_type=JSON, headers=dict(headers or {}))


def _refuse(
    request: Request,
    status: int,
    detail: str,
    code: str,
    *,
    headers: Mapping[str, str] | None = None,
    field: str | None = None,
) -> Response:
    """An error in the form that the clients of this path read."""
    if not request.url.path.startswith(_OPENAI_PATHS):
        return refusal(status, detail, code, headers)
    body = openai_error(status, detail, code, field)
    return Response(body, status_code=status, media_type=JSON, headers=dict(headers or {}))


def install_error_answers(app: FastAPI) -> None:
    """Make every error of the app answer in the one form."""
    for kind, answer in _ANSWERS.items():
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, _answer_unexpected)


async def answer_error(request: Request, error: Exception) -> tuple[Response, bool]:
    """What is answered to an error on a way past the framework, and whether it is of a kind that happens."""
    for kind in type(error).__mro__:
        if kind in _ANSWERS:
            return await _ANSWERS[kind](request, error), True
    return await _answer_unexpected(request, error), False


async def _answer_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwinkleError)
    status = _nearest(_STATUS, error)
    headers = {}
    if isinstance(error, InvalidToken):
        headers["WWW-Authenticate"] = _EXCHANGE_AGAIN
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    elif error.retryable:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if status >= 500:
        _log.warning("request.failed", path=request.url.path, code=error.code, error=error.message)
        await _slow_down(request)
    field = error.field if isinstance(error, InvalidInput) else None
    return _refuse(request, status, _public_text(error), error.code, headers=headers, field=field)


def openai_error_of(request: Request, error: Exception) -> bytes:
    """An error that comes when an answer has begun and its status is sent, as OpenAI's clients read it."""
    return openai_error(*_told_late(request, error))


def refusal_of(request: Request, error: Exception) -> bytes:
    """The same as all others read it."""
    _, detail, code, _ = _told_late(request, error)
    return orjson.dumps(Refusal(detail=detail, code=code))


def _told_late(request: Request, error: Exception) -> tuple[int, str, str, str | None]:
    """The status an error would have had, words, code and field."""
    if not isinstance(error, TwinkleError) or isinstance(error, StatementFailed):
        return 500, _log_unexpected(request, error), "internal", None
    status = _nearest(_STATUS, error)
    if status >= 500:
        _log.warning("request.failed", path=request.url.path, code=error.code, error=error.message)
    return status, _public_text(error), error.code, error.field if isinstance(error, InvalidInput) else None


async def _answer_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or "request"
    return _refuse(request, 422, f"{field}: {complaint(first)}", InvalidInput.code, field=field)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"no route {request.method} {request.url.path}" if error.status_code == 404 else str(error.detail)
    code = _CODE_OF_STATUS.get(error.status_code, "http")
    return _refuse(request, error.status_code, detail, code, headers=error.headers)


async def _answer_nobody(request: Request, _: Exception) -> Response:
    _log.debug("request.client_left", path=request.url.path)
    return _refuse(request, 400, "the client left before its request was complete", "client_left")


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    detail = _log_unexpected(request, error)
    await _slow_down(request)
    return _refuse(request, 500, detail, "internal")


def _log_unexpected(request: Request, error: Exception) -> str:
    """Put a crash into the log; what the client is told of it."""
    error_id = new_id()
    trace = "".join(traceback.format_exception(error))
    _log.error("request.crashed", error_id=error_id, path=request.url.path, trace=trace)
    return f"unexpected error {error_id}; the server's log has the details under this id"


def _public_text(error: TwinkleError) -> str:
    return next((_PUBLIC_TEXT[kind] for kind in type(error).__mro__ if kind in _PUBLIC_TEXT), error.message)


async def _slow_down(request: Request) -> None:
    if request.url.path.endswith(_HOT_LOOP_PATH):
        await asyncio.sleep(_HOT_LOOP_PAUSE_S)


def _nearest(table: Mapping[type[TwinkleError], int], error: TwinkleError) -> int:
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


_ANSWERS: Mapping[type, Callable[[Request, Exception], Awaitable[Response]]] = {
    TwinkleError: _answer_ours,
    StatementFailed: _answer_unexpected,
    RequestValidationError: _answer_invalid_parameter,
    HTTPException: _answer_http,
    ClientDisconnect: _answer_nobody,
}
