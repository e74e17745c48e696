"""Polls that are held until any sample of a sampling client ends: one for a client instead of one for a sample."""

from __future__ import annotations

import asyncio

from twinkle.server.threads import Threads
from twinkle.storage.journal.samples import EndedSample, SampleJournal

_SWEEP_S = 1.0
_MAX_ANSWERED = 1000


class LanePolls:
    """Everyone who waits for a lane. Lives on one event loop; only :meth:`notify` is for other threads."""

    def __init__(self, samples: SampleJournal, threads: Threads, *, sweep_s: float = _SWEEP_S) -> None:
        self._samples = samples
        self._threads = threads
        self._sweep_s = sweep_s
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, set[asyncio.Event]] = {}
        self._released = False

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
        woken = asyncio.Event()
        self._waiters.setdefault(lane, set()).add(woken)
        ends_at = self._loop.time() + timeout_s
        try:
            while True:
                ended = await self._threads.run(
                    self._samples.ended, lane, client=client, after=after, limit=_MAX_ANSWERED
                )
                left_s = ends_at - self._loop.time()
                if ended or left_s <= 0 or self._released:
                    return ended
                await _wait_at_most(woken, min(left_s, self._sweep_s))
        finally:
            self._waiters[lane].discard(woken)
            if not self._waiters[lane]:
                del self._waiters[lane]

    def _wake(self, lanes: set[str]) -> None:
        for lane in lanes:
            for waiter in self._waiters.get(lane, ()):
                waiter.set()


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
