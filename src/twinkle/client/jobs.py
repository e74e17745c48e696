"""Jobs: work that is handed over, goes on without this client, and is looked at again from anywhere by its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from twinkle.client.bodies import make_body, read_answer
from twinkle.client.connection import Connection
from twinkle.client.errors import JobEndedBadly
from twinkle.client.facade import Facade, LoopThread, blocking
from twinkle.client.transport import NATIVE_PREFIX, Request
from twinkle.wire.bodies.hooks import HookSecretResponse
from twinkle.wire.bodies.jobs import (
    DEFAULT_MAX_ATTEMPTS,
    AfterJob,
    CreatedJobsResponse,
    JobEventInfo,
    JobEventsResponse,
    JobRequest,
    JobResponse,
    JobsRequest,
    JobsResponse,
    JobStanding,
)
from twinkle.wire.bodies.jobs_groups import JobMembersResponse

_JOBS = f"{NATIVE_PREFIX}/jobs"
_POLL_S = 20.0
_SUCCEEDED = "succeeded"


class AsyncJob:
    """One job. Losing this object loses nothing: ``client.jobs.attach(id)`` is the same job."""

    def __init__(self, connection: Connection, job_id: str) -> None:
        self._connection = connection
        self.id = job_id

    async def show(self) -> JobResponse:
        """The job as it stands, with its spec and the attempts at it."""
        return await self._connection.ask(self._path(), JobResponse)

    async def news(self, *, after: int = 0, wait_s: float = 0.0) -> JobEventsResponse:
        """What happened behind an event's number; waits for something unless the job has ended.

        A server that is away for a while is waited for, however long.
        """
        path = f"{self._path('events')}?{urlencode({'after': after, 'wait_s': wait_s})}"
        raw = await self._connection.transport.send(Request(path=path, method="GET"), gives_up=False)
        return read_answer(JobEventsResponse, raw)

    async def events(self, *, after: int = 0) -> AsyncIterator[JobEventInfo]:
        """What has happened and what happens from now on, until the job has ended."""
        while True:
            news = await self.news(after=after, wait_s=_POLL_S)
            for event in news.events:
                after = event.number
                yield event
            if news.job.is_final and not news.events:
                return

    async def wait(self, timeout_s: float | None = None) -> JobStanding:
        """The job when it has ended, however it ended.

        Raises:
            TimeoutError: The time is up; the job goes on.
        """
        after = 0
        async with asyncio.timeout(timeout_s):
            while True:
                news = await self.news(after=after, wait_s=_POLL_S)
                if news.job.is_final:
                    return news.job
                after = news.events[-1].number if news.events else after

    async def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What came of the job.

        Raises:
            JobEndedBadly: It failed or was cancelled.
            TimeoutError: The time is up; the job goes on.
        """
        return result_of(await self.wait(timeout_s))

    async def cancel(self) -> JobResponse:
        """End the job; a training leaves a checkpoint, a batch what it has. Returns before that is done."""
        return await self._tell("cancel")

    async def pause(self) -> JobResponse:
        """Hold the job at its next safe point.

        Raises:
            Conflict: It has ended.
        """
        return await self._tell("pause")

    async def resume(self) -> JobResponse:
        """Let a paused job go on where it was.

        Raises:
            Conflict: It has ended.
        """
        return await self._tell("resume")

    async def retry(self) -> JobResponse:
        """Give a job that failed or was cancelled another attempt, from what it had saved.

        Raises:
            Conflict: It has not failed.
        """
        return await self._tell("retry")

    async def members(self) -> JobMembersResponse:
        """What a sweep or a flow is made of, and how it stands: a sweep's table with the best of it marked."""
        return await self._connection.ask(self._path("members"), JobMembersResponse)

    async def _tell(self, what: str) -> JobResponse:
        return await self._connection.ask(self._path(what), JobResponse, method="POST")

    def _path(self, *below: str) -> str:
        return "/".join((_JOBS, quote(self.id, safe=""), *below))


class AsyncJobs:
    """A tenant's jobs: ``client.jobs`` of an asynchronous client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def submit(
        self,
        kind: str,
        spec: Mapping[str, Any],
        *,
        client_id: str | None = None,
        name: str | None = None,
        after: Sequence[str | AfterJob] = (),
        priority: int | None = None,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        notify_url: str | None = None,
        metadata: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> AsyncJob:
        """Hand a job over; it goes on when this client is gone.

        Args:
            kind: ``sft``, ``dpo``, ``batch``, ``ops``, ...
            spec: What its kind asks for; the server says what is wrong with it.
            client_id: The same one with the same job is the same job, however often it is submitted.
            name: For people.
            after: Jobs that must have succeeded first, or with ``AfterJob(condition="any")`` ended.
            priority: From -100 to 100; without one it goes behind the tenant's interactive work.
            max_attempts: How often it is tried when it fails for a reason that may pass.
            notify_url: Told when it begins, is tried again and ends.
            metadata: Kept with it.
            dry_run: Only say what it would take.

        Raises:
            InvalidInput: Something in it is wrong; the message names it.
            Conflict: The client's id was used for another job.
        """
        request = make_body(
            JobRequest,
            kind=kind,
            spec=dict(spec),
            client_id=client_id,
            name=name,
            after=tuple(after),
            priority=priority,
            max_attempts=max_attempts,
            notify_url=notify_url,
            metadata=dict(metadata or {}),
            dry_run=dry_run,
        )
        job = await self._connection.ask(_JOBS, JobResponse, request)
        return self.attach(job.id)

    async def submit_many(self, requests: Sequence[JobRequest]) -> list[AsyncJob]:
        """Hand up to a thousand jobs over in one transaction: all of them or none; raises as :meth:`submit`."""
        body = make_body(JobsRequest, jobs=tuple(requests))
        created = await self._connection.ask(f"{_JOBS}/many", CreatedJobsResponse, body)
        return [self.attach(job.id) for job in created.jobs]

    def attach(self, job_id: str) -> AsyncJob:
        """A job that was submitted earlier, by this process or another one. Asks nothing."""
        return AsyncJob(self._connection, job_id)

    async def page(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        kinds: Sequence[str] = (),
        states: Sequence[str] = (),
        parent: str | None = None,
    ) -> JobsResponse:
        """Jobs, newest first; the answer's ``cursor`` gives the next page."""
        query: list[tuple[str, str | int]] = [("limit", limit)]
        query += [("kind", kind) for kind in kinds] + [("state", state) for state in states]
        query += [(name, value) for name, value in (("cursor", cursor), ("parent", parent)) if value is not None]
        return await self._connection.ask(f"{_JOBS}?{urlencode(query)}", JobsResponse)

    async def webhook_secret(self) -> str:
        """What the signatures of this tenant's webhooks are checked with, as libraries of Standard Webhooks take it."""
        return (await self._connection.ask(f"{_JOBS}/webhook_secret", HookSecretResponse)).secret


class Job(Facade[AsyncJob]):
    """:class:`AsyncJob` for plain scripts."""

    @property
    def id(self) -> str:
        """By which it is found again."""
        return self._inner.id

    show = blocking(AsyncJob.show)
    news = blocking(AsyncJob.news)
    wait = blocking(AsyncJob.wait)
    result = blocking(AsyncJob.result)
    cancel = blocking(AsyncJob.cancel)
    pause = blocking(AsyncJob.pause)
    resume = blocking(AsyncJob.resume)
    retry = blocking(AsyncJob.retry)
    members = blocking(AsyncJob.members)

    def events(self, *, after: int = 0) -> Iterator[JobEventInfo]:
        """As :meth:`AsyncJob.events`; blocks between two events."""
        while True:
            news = self.news(after=after, wait_s=_POLL_S)
            for event in news.events:
                after = event.number
                yield event
            if news.job.is_final and not news.events:
                return


class Jobs(Facade[AsyncJobs]):
    """A tenant's jobs: ``client.jobs``."""

    def __init__(self, thread: LoopThread, inner: AsyncJobs) -> None:
        super().__init__(thread, inner)
        self._submit = blocking(AsyncJobs.submit)
        self._submit_many = blocking(AsyncJobs.submit_many)

    def submit(
        self,
        kind: str,
        spec: Mapping[str, Any],
        *,
        client_id: str | None = None,
        name: str | None = None,
        after: Sequence[str | AfterJob] = (),
        priority: int | None = None,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        notify_url: str | None = None,
        metadata: Mapping[str, str] | None = None,
        dry_run: bool = False,
    ) -> Job:
        """As :meth:`AsyncJobs.submit`."""
        job = self._submit(
            self,
            kind,
            spec,
            client_id=client_id,
            name=name,
            after=after,
            priority=priority,
            max_attempts=max_attempts,
            notify_url=notify_url,
            metadata=metadata,
            dry_run=dry_run,
        )
        return Job(self._thread, job)

    def submit_many(self, requests: Sequence[JobRequest]) -> list[Job]:
        """As :meth:`AsyncJobs.submit_many`."""
        return [Job(self._thread, job) for job in self._submit_many(self, requests)]

    def attach(self, job_id: str) -> Job:
        """As :meth:`AsyncJobs.attach`."""
        return Job(self._thread, self._inner.attach(job_id))

    page = blocking(AsyncJobs.page)
    webhook_secret = blocking(AsyncJobs.webhook_secret)


def result_of(job: JobStanding) -> dict[str, Any]:
    """What came of a job that has ended.

    Raises:
        JobEndedBadly: Nothing did.
    """
    if job.state == _SUCCEEDED:
        return job.result or {}
    failure = job.failure
    if failure is None:
        raise JobEndedBadly(f"job {job.id} was {job.state}", job_id=job.id, code=job.state)
    raise JobEndedBadly(f"job {job.id} {job.state}: {failure.message}", job_id=job.id, code=failure.code)
