"""Polls that are held until something happens in a job: one query a second for all of them, however many."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import Job, JobEvent
from twinkle.server.answering.held_polls import HeldPolls, Waiter
from twinkle.server.threads import Threads
from twinkle.storage.jobs.jobs import Jobs

_SWEEP_S = 1.0
_MAX_IDS_PER_QUERY = 500

_log = structlog.get_logger()


@dataclass(frozen=True)
class News:
    """What happened in a job after a number, and how it stands since."""

    events: list[JobEvent]
    job: Job


class _Follower(Waiter):
    """It is woken when the job has more events than these."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after


class JobPolls(HeldPolls[_Follower]):
    """Everyone who follows a job. Lives on one event loop; only :meth:`notify` is for other threads."""

    def __init__(self, jobs: Jobs, threads: Threads, *, sweep_s: float = _SWEEP_S) -> None:
        super().__init__(sweep_s=sweep_s)
        self._jobs = jobs
        self._threads = threads

    def notify(self, ids: list[str]) -> None:
        """Hear that something happened in these, if they are jobs. Callable from any thread, also at the very end."""
        self._tell(set(ids))

    async def wait(self, job_id: str, tenant: str, *, after: int, limit: int, timeout_s: float) -> News:
        """What happened behind event number ``after``; at once if anything did, or the job has ended.

        Raises:
            NotFound: There is no such job, or it is another tenant's.
            StorageUnavailable: The database did not answer.
        """

        async def read() -> News:
            return await self._threads.run(self._read, job_id, tenant, after, limit)

        news = await self._held(
            job_id,
            _Follower(after),
            read=read,
            is_enough=lambda news: bool(news.events) or news.job.state.is_final,
            timeout_s=timeout_s,
        )
        # How far it is may have changed without an event.
        return await read() if news is None else news

    def _read(self, job_id: str, tenant: str, after: int, limit: int) -> News:
        # The job before and after: it is never older than its events, and where it has ended its last event is among
        # those that are read.
        before = self._jobs.find(job_id, tenant)
        while True:
            events = self._jobs.events(job_id, tenant, after=after, limit=limit)
            job = self._jobs.find(job_id, tenant)
            if before.state.is_final or not job.state.is_final:
                return News(events, job)
            before = job

    async def _sweep(self) -> None:
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
