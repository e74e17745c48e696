"""Polls that are held until any sample of a sampling client ends: one for a client instead of one for a sample."""

from __future__ import annotations

import asyncio

import structlog

from twinkle.core.errors import StorageUnavailable
from twinkle.server.threads import Threads, say_if_it_ends
from twinkle.storage.sampling.sampling_sessions import EndedSample, SamplePoll, SamplingSessions

_SWEEP_S = 1.0
_MAX_ANSWERED = 1000
_MAX_POLLS_PER_QUERY = 500

_log = structlog.get_logger()


class _Waiter:
    """One held poll."""

    def __init__(self, poll: SamplePoll) -> None:
        self.poll = poll
        self.woken = asyncio.Event()


class LanePolls:
    """Everyone who waits for a lane. Lives on one event loop; only :meth:`notify` is for other threads."""

    def __init__(self, samples: SamplingSessions, threads: Threads, *, sweep_s: float = _SWEEP_S) -> None:
        self._samples = samples
        self._threads = threads
        self._sweep_s = sweep_s
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, set[_Waiter]] = {}
        self._released = False
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeper = self._loop.create_task(self._sweep_forever())
        say_if_it_ends(self._sweeper)

    async def stop(self) -> None:
        """End; nobody may wait any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def notify(self, request_ids: list[str]) -> None:
        """Hear that these futures may be done. Callable from any thread, also when the loop is about to end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(
                self._wake, {request_id.rpartition(":req:")[0] for request_id in request_ids}
            )

    def release(self) -> None:
        """Let all held polls go, and those to come: the server is about to stop."""
        self._released = True
        self._wake(set(self._waiters))

    async def wait(self, lane: str, *, client: int, after: int, timeout_s: float) -> list[EndedSample]:
        """What of a client's samples ended after number ``after``; nothing when the time is up.

        The waiter is registered first and the journal read second, so no completion falls between the two; the sweep
        stands behind lost messages.

        Raises:
            StorageUnavailable: The journal could not be read.
        """
        waiter = _Waiter(SamplePoll(lane=lane, client=client, after=after))
        self._waiters.setdefault(lane, set()).add(waiter)
        ends_at = self._loop.time() + timeout_s
        try:
            while True:
                waiter.woken.clear()
                ended = await self._threads.run(
                    self._samples.ended, lane, client=client, after=after, limit=_MAX_ANSWERED
                )
                left_s = ends_at - self._loop.time()
                if ended or left_s <= 0 or self._released:
                    return ended
                try:
                    async with asyncio.timeout(left_s):
                        await waiter.woken.wait()
                except TimeoutError:
                    return []
        finally:
            self._waiters[lane].discard(waiter)
            if not self._waiters[lane]:
                del self._waiters[lane]

    def _wake(self, lanes: set[str]) -> None:
        for lane in lanes:
            for waiter in self._waiters.get(lane, ()):
                waiter.woken.set()

    async def _sweep_forever(self) -> None:
        """Find those whose message was lost: one query for all that are held, however many."""
        while True:
            await asyncio.sleep(self._sweep_s)
            waiters = [waiter for held in self._waiters.values() for waiter in held]
            for start in range(0, len(waiters), _MAX_POLLS_PER_QUERY):
                await self._wake_some(waiters[start : start + _MAX_POLLS_PER_QUERY])

    async def _wake_some(self, waiters: list[_Waiter]) -> None:
        query = asyncio.create_task(self._threads.run(self._samples.having_ended, [waiter.poll for waiter in waiters]))
        await asyncio.wait([query])
        error = query.exception()
        if isinstance(error, StorageUnavailable):
            _log.warning("lane_polls.read_failed", error=error.message, held=len(waiters), next="the sweep asks again")
        elif error is not None:
            # They read for themselves, and tell their clients what came of it.
            for waiter in waiters:
                waiter.woken.set()
        else:
            for place in query.result():
                waiters[place].woken.set()
