"""HTTP as the client uses it: sent again while that is worth it, and every refusal as a typed error.

All requests carry what makes a repetition harmless (a number, an idempotency key), so any of them may be sent twice.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import httpx

from twinkle.client.backoff import RetryPolicy
from twinkle.client.endpoint import Endpoint
from twinkle.client.errors import Overloaded, TransientError, Unavailable, refusal_of

TINKER_PREFIX = "/api/v1"
NATIVE_PREFIX = "/api/native/v1"

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 60.0
_MAX_CONNECTIONS = 64
_MAX_SUBMISSIONS = 16
_LONGEST_RETRY_AFTER_S = 60.0
_JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent, each time the same."""

    path: str
    method: str = "POST"
    content: bytes = b""
    content_type: str = _JSON
    headers: dict[str, str] = field(default_factory=dict)
    read_timeout_s: float = _READ_TIMEOUT_S


class Transport:
    """Requests to one server. Lives on one event loop."""

    def __init__(
        self, endpoint: Endpoint, policy: RetryPolicy, *, carrier: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Connect nothing yet; ``carrier`` is how requests travel, over the network if nothing is said."""
        self._policy = policy
        self._submissions = asyncio.Semaphore(_MAX_SUBMISSIONS)
        self._http = httpx.AsyncClient(
            base_url=endpoint.url,
            transport=carrier,
            headers={"X-API-Key": endpoint.api_key.get_secret_value()},
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=_MAX_CONNECTIONS),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def submit(self, request: Request) -> bytes:
        """Send an operation; a few at once, however many there are. Raises as :meth:`send` does."""
        async with self._submissions:
            return await self.send(request)

    async def send(self, request: Request, *, gives_up: bool = True) -> bytes:
        """The answer's body.

        Raises:
            UserError: The server refused it with a 4xx, at the first time.
            Overloaded: It was answered 429 until the time was up.
            Unavailable: There was no connection or no proper answer until the time was up.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._policy.give_up_after_s
        attempt = 0
        while True:
            try:
                return await self._try(request)
            except TransientError as error:
                retry_after_s = error.retry_after_s if isinstance(error, Overloaded | _Later) else 0.0
                delay_s = self._policy.delay_s(attempt, retry_after_s=retry_after_s)
                if gives_up and loop.time() + delay_s > ends_at:
                    raise
            attempt += 1
            await asyncio.sleep(delay_s)

    async def _try(self, request: Request) -> bytes:
        timeout = httpx.Timeout(request.read_timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None)
        headers = {"content-type": request.content_type, **request.headers} if request.content else request.headers
        try:
            response = await self._http.request(
                request.method, request.path, content=request.content or None, headers=headers, timeout=timeout
            )
        except httpx.TransportError as error:
            raise Unavailable(f"{self._http.base_url}: {_words(error)}") from error
        if response.is_success:
            return response.content
        raise _error_of(response)


class _Later(Unavailable):
    """The server said when to come back."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _error_of(response: httpx.Response) -> Exception:
    status = response.status_code
    detail, code = _read_refusal(response)
    if status == httpx.codes.TOO_MANY_REQUESTS:
        return Overloaded(detail, retry_after_s=max(1, round(_retry_after_s(response))))
    if status >= httpx.codes.INTERNAL_SERVER_ERROR or status == httpx.codes.REQUEST_TIMEOUT:
        return _Later(f"{status}: {detail}", retry_after_s=_retry_after_s(response))
    return refusal_of(status, code, detail)


def _read_refusal(response: httpx.Response) -> tuple[str, str]:
    """The server's words and code; a proxy in between has neither."""
    try:
        body = json.loads(response.content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return f"{response.status_code} {response.reason_phrase}", ""
    return str(body.get("detail", response.reason_phrase)), str(body.get("code", ""))


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return min(float(text), _LONGEST_RETRY_AFTER_S) if text.isdecimal() else 0.0


def _words(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
