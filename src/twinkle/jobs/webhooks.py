"""Tells owners of jobs what happened, at the URLs they gave: at least once, signed, and never where only we can reach.

A name is resolved once and the address it stands for is the one that is connected to, so that nothing can change
between the look and the call; redirects are not followed. What a receiver does never touches the job.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from typing import TypeVar

import httpx
import structlog

from twinkle.core.addresses import Network, is_allowed
from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import JobState
from twinkle.storage.jobs.hooks import DueHook, JobHooks, hook_id
from twinkle.wire.bodies.hooks import HookBody, HookData, signed_headers
from twinkle.wire.bodies.jobs import JobEventInfo, JobFailureInfo

T = TypeVar("T")

_EVERY_S = 1.0
_SQL_THREADS = 2
_AT_ONCE = 64
_EACH = 4
"""Of one tenant at once: a URL that answers nobody holds up its own tenant's calls alone."""
_TIMEOUT_S = 10.0
_HOLD_S = 60.0
"""Longer than a call can take: whoever has not said what came of it by then has died."""
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 3600.0
_PATIENCE_S = 24 * 3600.0
"""After the event, when it is no longer told."""

_log = structlog.get_logger()


class _Refused(Exception):
    """It was not taken, or not sent; in words for the job's owner."""


@dataclass(frozen=True, kw_only=True)
class Webhooks:
    """Delivers what is due. Any number of processes may; each event is one's at a time."""

    hooks: JobHooks
    key_of: Callable[[str], bytes]
    """The signing key of a tenant."""
    clock: Clock
    allowed: Sequence[Network] = ()
    """Networks beside the public internet."""
    verify: ssl.SSLContext = field(default_factory=partial(httpx.create_ssl_context, trust_env=False))
    """Whose certificates are believed. To read them takes some 30 ms of the loop, so it is done once."""
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_SQL_THREADS, thread_name_prefix="webhooks-sql")
    )
    under_way: dict[asyncio.Task[None], str] = field(default_factory=dict)
    """Calls that have begun, each with its tenant."""

    @asynccontextmanager
    async def delivering(self) -> AsyncIterator[None]:
        """Deliver for as long as the block lasts."""
        task = asyncio.create_task(self._deliver_forever())
        try:
            yield
        finally:
            calls = [task, *self.under_way]
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            self.threads.shutdown()

    async def deliver_due(self) -> int:
        """Tell what is due by now, the next event of each job; of how many jobs that was.

        Raises:
            StorageUnavailable: The journal did not answer.
        """
        begun = await self._begin_due()
        await asyncio.gather(*begun)
        return len(begun)

    async def _begin_due(self) -> list[asyncio.Task[None]]:
        """Begin to tell what is due, as much of each tenant's as its share is."""
        room = _AT_ONCE - len(self.under_way)
        if room <= 0:
            return []
        begun: list[asyncio.Task[None]] = []
        # A call that is under way holds its job, which is not due meanwhile.
        for due in await self._sql(partial(self.hooks.due, limit=_AT_ONCE, each=_EACH)):
            if len(begun) < room and Counter(self.under_way.values())[due.tenant] < _EACH:
                call = asyncio.create_task(self._deliver(due.id))
                self.under_way[call] = due.tenant
                call.add_done_callback(self._ended)
                begun.append(call)
        return begun

    def _ended(self, call: asyncio.Task[None]) -> None:
        del self.under_way[call]
        error = None if call.cancelled() else call.exception()
        if isinstance(error, StorageUnavailable):
            _log.warning("webhooks.waiting", error=error.message, next="what is still due is told later")
        elif error is not None:
            _log.error("webhooks.failed", error=str(error), exc_info=error)

    async def _deliver_forever(self) -> None:
        while True:
            begun: list[asyncio.Task[None]] = []
            try:
                begun = await self._begin_due()
            except StorageUnavailable as error:
                _log.warning("webhooks.waiting", error=error.message, retry_s=_EVERY_S)
            except Exception as error:  # noqa: BLE001 - the border: one event that cannot be told must not end all others
                _log.error("webhooks.failed", error=str(error), exc_info=error)
            if begun:
                # The next event of a job that was told, or somebody else's in the place that is free.
                await asyncio.wait(begun, timeout=_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_EVERY_S)

    async def _deliver(self, job_id: str) -> None:
        hook = await self._sql(partial(self.hooks.take, job_id, hold_s=_HOLD_S))
        if hook is None:
            return
        try:
            status = await self._call(hook)
        except _Refused as error:
            await self._sql(partial(self._put_off, hook, str(error)))
            return
        _log.info("webhook.told", job=job_id, number=hook.event.number, status=status)
        words = f"notify_url was told of event {hook.event.number} ({status})"
        await self._sql(partial(self.hooks.end, hook, words))

    async def _sql(self, ask: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, ask)

    def _put_off(self, hook: DueHook, reason: str) -> None:
        what = f"notify_url was not told of event {hook.event.number}: {reason}"
        pause_s = min(_FIRST_PAUSE_S * 2.0**hook.num_refusals, _LONGEST_PAUSE_S)
        if self.clock.now() + pause_s > hook.event.at + _PATIENCE_S:
            _log.warning("webhook.given_up", job=hook.job.id, number=hook.event.number, reason=reason)
            self.hooks.end(hook, f"{what}; it was tried for a day, and is not any more")
        else:
            self.hooks.put_off(hook, f"{what}; the next try comes in {pause_s:.0f} s", seconds=pause_s)

    async def _call(self, hook: DueHook) -> int:
        """The receiver's status, which is one of 200 to 299."""
        assert hook.job.notify_url is not None, "only those with a URL are due"
        body = body_of(hook).to_json()
        headers = signed_headers(
            self.key_of(hook.job.tenant), hook_id=hook_id(hook), timestamp=int(self.clock.now()), body=body
        )
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status = await self._post(httpx.URL(hook.job.notify_url), body, headers)
        except TimeoutError:
            raise _Refused(f"it did not answer within {_TIMEOUT_S:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _Refused(f"it cannot be reached ({type(error).__name__})") from error
        if not 200 <= status < 300:
            redirect = "; redirects are not followed" if 300 <= status < 400 else ""
            raise _Refused(f"it answered {status}{redirect}")
        return status

    async def _post(self, url: httpx.URL, body: bytes, headers: dict[str, str]) -> int:
        port = url.port or {"https": 443}.get(url.scheme, 80)
        address = await self._resolve(url.host, port)
        # The certificate must be that of the name, which is also what the receiver is asked for.
        named = {**headers, "host": url.netloc.decode()}
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, verify=self.verify) as client,
            client.stream(
                "POST",
                url.copy_with(host=address, port=port),
                content=body,
                headers=named,
                extensions={"sni_hostname": url.host},
            ) as response,
        ):
            return response.status_code

    async def _resolve(self, host: str, port: int) -> str:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(place[0]).partition("%")[0] for *_, place in found]
        if not addresses or not all(is_allowed(ip_address(one), self.allowed) for one in addresses):
            raise _Refused(f"{host} is no address of the public internet, and the operator has not allowed it")
        return addresses[0]


def body_of(hook: DueHook) -> HookBody:
    """What is told: the same each time, as far as the job has not ended in between."""
    job, event = hook.job, hook.event
    state = str(event.data.get("state", job.state.value))
    is_end = event.kind == "status" and JobState(state).is_final and job.state.value == state
    failure = job.failure
    return HookBody(
        type="job.attempt" if event.kind == "attempt" else f"job.{state}",
        timestamp=event.at,
        data=HookData(
            job_id=job.id,
            kind=job.kind.value,
            state=state,
            name=job.name,
            client_id=job.client_id,
            metadata=job.metadata,
            event=JobEventInfo(
                number=event.number, time=event.at, kind=event.kind, message=event.message, data=event.data
            ),
            result=job.result if is_end else None,
            failure=None
            if failure is None or not is_end
            else JobFailureInfo(
                code=failure.code,
                message=failure.message,
                is_transient=failure.is_transient,
                field=failure.field,
                details=failure.details,
            ),
        ),
    )
