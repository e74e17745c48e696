"""Requests over one server's connections: sent again where that is harmless, and every refusal a typed error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from twinkle.client.backoff import RetryPolicy
from twinkle_client.errors import ClientClosed, Overloaded, Unavailable, error_of, words_of

CALL_TIMEOUT_S = 600.0
"""How long a call may take, as upstream's client has it."""

_CONNECT_TIMEOUT_S = 5.0
_LONGEST_RETRY_AFTER_S = 60.0
_MAX_CONNECTIONS = 64
# Less than servers keep an idle connection, so that none closes it under a request.
_KEEP_IDLE_S = 4.0
# Answers that say that nothing was done, from whatever server.
_LATER = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
# What a proxy says whose server went away; something may have been done.
_LOST = (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT, httpx.codes.REQUEST_TIMEOUT)
# Nothing of the request has reached anybody.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent, each time the same."""

    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    may_repeat: bool = True
    """Whether doing it twice is doing it once, so that it may be sent again when nobody knows whether it arrived."""
    answers_within_s: float | None = None
    """When to give up an attempt; until the deadline if nothing is said."""


class Sender:
    """Connections to one server, for all threads of one process."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        policy: RetryPolicy | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connect nothing yet."""
        self._policy = policy or RetryPolicy()
        self._sleep = sleep
        self._http = httpx.Client(
            base_url=url,
            headers=dict(headers),
            limits=httpx.Limits(
                max_connections=_MAX_CONNECTIONS,
                max_keepalive_connections=_MAX_CONNECTIONS,
                keepalive_expiry=_KEEP_IDLE_S,
            ),
        )

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def send(self, request: Request, *, timeout_s: float) -> httpx.Response:
        """The answer, a success. Blocks, at most ``timeout_s``.

        Raises:
            TimeoutError: There was no answer in time, though the request had arrived.
            Overloaded: It was answered 429 until the time was up.
            Unavailable: There was no connection, or 503, until the time was up; or the connection broke under a request
                that cannot be sent twice.
            TwinkleError: The server refused it, or failed.
        """
        ends_at = time.monotonic() + timeout_s
        attempt = 0
        refused: Exception | None = None
        while True:
            try:
                return self._try(request, ends_at - time.monotonic())
            except _Later as later:
                refused = later.error
                delay_s = self._policy.delay_s(attempt, retry_after_s=later.retry_after_s)
                if not later.may_repeat or time.monotonic() + delay_s > ends_at:
                    raise refused from later.__cause__
            except TimeoutError:
                # Too little time was left for the last attempt: what kept the others from it says more.
                if refused is None:
                    raise
                raise refused from None
            attempt += 1
            self._sleep(delay_s)

    @contextmanager
    def stream(self, request: Request, *, timeout_s: float) -> Iterator[httpx.Response]:
        """The answer while it comes; each piece of it may take ``timeout_s``. Sent once, raises as :meth:`send`."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        try:
            with self._http.stream(
                request.method, request.path, content=request.content, headers=dict(request.headers), timeout=timeout
            ) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield response
        except httpx.TransportError as error:
            raise self._lost(request, error) from error

    def _try(self, request: Request, left_s: float) -> httpx.Response:
        left_s = max(left_s, 0.001)
        attempt_s = left_s if request.answers_within_s is None else min(left_s, request.answers_within_s)
        try:
            response = self._http.request(
                request.method,
                request.path,
                content=request.content or None,
                headers=dict(request.headers),
                timeout=httpx.Timeout(attempt_s, connect=min(_CONNECT_TIMEOUT_S, attempt_s)),
            )
        except httpx.ReadTimeout as error:
            if attempt_s >= left_s:
                raise TimeoutError(f"{request.path}: no answer in time; the server may still be at it") from error
            raise _Later(self._lost(request, error), may_repeat=request.may_repeat) from error
        except httpx.TransportError as error:
            raise _Later(self._lost(request, error), may_repeat=request.may_repeat or _is_unsent(error)) from error
        except RuntimeError:
            if self._http.is_closed:
                raise ClientClosed("the connection was closed") from None
            raise
        if response.is_success:
            return response
        raise _error_of(response, may_repeat=request.may_repeat)

    def _lost(self, request: Request, error: httpx.TransportError) -> Unavailable:
        words = f"{self._http.base_url}: {str(error) or type(error).__name__}"
        if not (request.may_repeat or _is_unsent(error)):
            words += "; whether the server has done it is not known, and it takes no call twice safely"
        return Unavailable(words)


class _Later(Exception):
    """An attempt that came to nothing: what it is in the end, and whether another one is harmless."""

    def __init__(self, error: Exception, *, may_repeat: bool, retry_after_s: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.may_repeat = may_repeat
        self.retry_after_s = retry_after_s


def _is_unsent(error: httpx.TransportError) -> bool:
    return isinstance(error, _UNSENT)


def _error_of(response: httpx.Response, *, may_repeat: bool) -> Exception:
    status, retry_after_s = response.status_code, _retry_after_s(response)
    if status == httpx.codes.TOO_MANY_REQUESTS:
        error = Overloaded(words_of(response), retry_after_s=max(1, round(retry_after_s)))
        return _Later(error, may_repeat=True, retry_after_s=retry_after_s)
    if status in _LATER or (status in _LOST and may_repeat):
        return _Later(Unavailable(words_of(response)), may_repeat=True, retry_after_s=retry_after_s)
    return error_of(response)


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), _LONGEST_RETRY_AFTER_S) if text.isdecimal() else 0.0
