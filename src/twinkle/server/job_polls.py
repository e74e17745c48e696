"""Polls that are held until something happens in a job: one query a second for all of them, however many."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import Job, JobEvent
from twinkle.server.threads import Threads, say_if_it_ends
from twinkle.storage.jobs.jobs import Jobs

_SWEEP_S = 1.0
_MAX_IDS_PER_QUERY = 500

_log = structlog.get_logger()


@dataclass(frozen=True)
class News:
    """What happened in a job after a number, and how it stands since."""

    events: list[JobEvent]
    job: Job


class _Waiter:
    """One held poll: it is woken when the job has more events than these."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.woken = asyncio.Event()


class JobPolls:
    """Everyone who follows a job. Lives on one event loop; only :meth:`notify` is for other threads."""

    def __init__(self, jobs: Jobs, threads: Threads, *, sweep_s: float = _SWEEP_S) -> None:
        self._jobs = jobs
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

    def notify(self, ids: list[str]) -> None:
        """Hear that something happened in these, if they are jobs. Callable from any thread, also at the very end."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, ids)

    def release(self) -> None:
        """Let all held polls go, and those to come: the server is about to stop."""
        self._released = True
        self._wake(list(self._waiters))

    async def wait(self, job_id: str, tenant: str, *, after: int, limit: int, timeout_s: float) -> News:
        """What happened behind event number ``after``; at once if anything did, or the job has ended.

        The waiter is registered first and the job read second, so nothing falls between the two; the sweep stands
        behind lost messages.

        Raises:
            NotFound: There is no such job, or it is another tenant's.
            StorageUnavailable: The database did not answer.
        """
        waiter = _Waiter(after)
        self._waiters.setdefault(job_id, set()).add(waiter)
        ends_at = self._loop.time() + timeout_s
        try:
            while True:
                waiter.woken.clear()
                news = await self._threads.run(self._read, job_id, tenant, after, limit)
                left_s = ends_at - self._loop.time()
                if news.events or news.job.state.is_final or left_s <= 0 or self._released:
                    return news
                try:
                    async with asyncio.timeout(left_s):
                        await waiter.woken.wait()
                except TimeoutError:
                    # How far it is may have changed without an event.
                    return await self._threads.run(self._read, job_id, tenant, after, limit)
        finally:
            self._waiters[job_id].discard(waiter)
            if not self._waiters[job_id]:
                del self._waiters[job_id]

    def _read(self, job_id: str, tenant: str, after: int, limit: int) -> News:
        # The job first: if it has ended by then, its last event is among those that are read now.
        job = self._jobs.find(job_id, tenant)
        return News(self._jobs.events(job_id, tenant, after=after, limit=limit), job)

    def _wake(self, ids: list[str]) -> None:
        for job_id in ids:
            for waiter in self._waiters.get(job_id, ()):
                waiter.woken.set()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            ids = list(self._waiters)
            for start in range(0, len(ids), _MAX_IDS_PER_QUERY):
                await self._look(ids[start : start + _MAX_IDS_PER_QUERY])

    async def _look(self, ids: list[str]) -> None:
        query = asyncio.create_task(self._threads.run(self._jobs.num_events, ids))
        await asyncio.wait([query])
        error = query.exception()
        if isinstance(error, StorageUnavailable):
            _log.warning("job_polls.read_failed", error=error.message, held=len(ids), next="the sweep asks again")
        elif error is not None:
            # They read for themselves, and tell their clients what came of it.
            self._wake(ids)
        else:
            numbers = query.result()
            for job_id in ids:
                for waiter in self._waiters.get(job_id, ()):
                    if numbers.get(job_id, waiter.after + 1) > waiter.after:
                        waiter.woken.set()
