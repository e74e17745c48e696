"""Jobs: submitted one or many at once, listed, followed, and told to pause, to go on, to end, to try again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from twinkle.core.job import Job, JobAttempt, JobEvent, JobKind, JobState, NewJob
from twinkle.server.access.sealing import Sealer, shown
from twinkle.server.job_submission import REQUEST_PREFIX, ids_of, new_job, submit_jobs
from twinkle.server.openapi import Access, Raw, described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key
from twinkle.server.state import Accounts, Common, JobBook, JobParts, Server, ServerState, Tenant
from twinkle.server.tinker.answers import answer
from twinkle.wire.bodies.hooks import HookSecretResponse, secret_text
from twinkle.wire.bodies.jobs import (
    MAX_EVENT_WAIT_S,
    MAX_EVENTS,
    CreatedJobsResponse,
    JobAttemptInfo,
    JobEventInfo,
    JobEventsResponse,
    JobFailureInfo,
    JobRequest,
    JobResponse,
    JobsRequest,
    JobsResponse,
    JobStanding,
    JobWaitInfo,
    published_schema,
)
from twinkle.wire.bodies.jobs_base import parse_part

_LISTING = "jobs"
_MAX_PAGE = 200
_SCHEMA = "application/schema+json"

router = APIRouter(prefix="/jobs")


@router.post("", openapi_extra=described(JobResponse, body=JobRequest, refusals=[404], headers=[HEADER]))
async def create_job(request: Request, server: Server, tenant: Tenant) -> Response:
    """Submit a job. The same ``client_id``, or else idempotency key, with the same body is the same job."""
    body = parse_part(JobRequest, await server.common.bodies.read(request))
    ids = await ids_of(server, tenant, [body])
    new = new_job(tenant, body, idempotency_key=idempotency_key(request), ids=ids, sealer=server.jobs.sealer)
    job = (await submit_jobs(server, tenant, [new]))[0]
    return await _answer_job(server.common, server.jobs, job)


@router.post("/many", openapi_extra=described(CreatedJobsResponse, body=JobsRequest, refusals=[404], headers=[HEADER]))
async def create_jobs(request: Request, server: Server, tenant: Tenant) -> Response:
    """Submit up to a thousand jobs in one transaction; one may wait for another one by its ``client_id``."""
    key = idempotency_key(request)
    async with server.common.bodies.receive(request) as received:
        body = await server.common.object_io.run(parse_part, JobsRequest, received.complete())
        ids = await ids_of(server, tenant, body.jobs)
        news = await server.common.object_io.run(_new_jobs, body, tenant, key, ids, server.jobs.sealer)
    created = await submit_jobs(server, tenant, news)
    return answer(CreatedJobsResponse(jobs=[standing_of(job) for job in created]))


@router.get("/schema", openapi_extra=described(Raw(_SCHEMA, "A draft of 2020-12."), access=Access.NONE))
async def show_schema() -> Response:
    """The JSON schema of a job's request, each kind's ``spec`` included."""
    return Response(orjson.dumps(published_schema()), media_type=_SCHEMA)


@router.get("/webhook_secret", openapi_extra=described(HookSecretResponse))
async def show_webhook_secret(book: JobBook, tenant: Tenant) -> Response:
    """What the signatures of the caller's webhooks are checked with."""
    return answer(HookSecretResponse(secret=secret_text(book.hook_key_of(tenant))))


@router.get("", openapi_extra=described(JobsResponse))
async def list_jobs(
    common: Common,
    accounts: Accounts,
    book: JobBook,
    tenant: Tenant,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 50,
    cursor: Annotated[str | None, Query(max_length=1024)] = None,
    kind: Annotated[list[JobKind] | None, Query(max_length=len(JobKind))] = None,
    state: Annotated[list[JobState] | None, Query(max_length=len(JobState))] = None,
    parent: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """The caller's jobs, newest first; of some kinds, in some states, members of one."""
    after = None if cursor is None else accounts.cursors.read(tenant, _LISTING, cursor)
    page = partial(
        book.store.page, tenant, limit=limit + 1, after=after, kinds=kind or (), states=state or (), parent=parent
    )
    found = await common.listings.run(tenant, page)
    shown = found[:limit]
    more = len(found) > limit
    following = accounts.cursors.write(tenant, _LISTING, shown[-1].created_at, shown[-1].id) if more else None
    return answer(JobsResponse(jobs=[standing_of(job) for job in shown], cursor=following))


@router.get("/{job_id}", openapi_extra=described(JobResponse, refusals=[404]))
async def show_job(job_id: str, common: Common, book: JobBook, tenant: Tenant) -> Response:
    """One job, with its spec and the attempts at it."""
    job = await common.sql.run(book.store.find, job_id, tenant)
    return await _answer_job(common, book, job)


@router.get("/{job_id}/events", openapi_extra=described(JobEventsResponse, refusals=[404]))
async def show_events(
    job_id: str,
    common: Common,
    book: JobBook,
    tenant: Tenant,
    after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 200,
    wait_s: Annotated[float, Query(ge=0, le=MAX_EVENT_WAIT_S)] = 0.0,
) -> Response:
    """What happened in a job behind event number ``after``; waits for something unless the job has ended."""
    timeout_s = min(wait_s, common.settings.long_poll_s)
    news = await book.polls.wait(job_id, tenant, after=after, limit=limit, timeout_s=timeout_s)
    return answer(JobEventsResponse(events=[_event(one) for one in news.events], job=standing_of(news.job)))


@router.post("/{job_id}/cancel", openapi_extra=described(JobResponse, refusals=[404]))
async def cancel_job(job_id: str, server: Server, tenant: Tenant) -> Response:
    """End a job; a training leaves a checkpoint, a batch what it has. One that has ended is left as it is."""
    return await _tell(server, server.jobs.store.request_cancel, job_id, tenant)


@router.post("/{job_id}/pause", openapi_extra=described(JobResponse, refusals=[404]))
async def pause_job(job_id: str, server: Server, tenant: Tenant) -> Response:
    """Hold a job at its next safe point."""
    return await _tell(server, server.jobs.store.request_pause, job_id, tenant)


@router.post("/{job_id}/resume", openapi_extra=described(JobResponse, refusals=[404]))
async def resume_job(job_id: str, server: Server, tenant: Tenant) -> Response:
    """Let a paused job go on where it was."""
    return await _tell(server, server.jobs.store.request_resume, job_id, tenant)


@router.post("/{job_id}/retry", openapi_extra=described(JobResponse, refusals=[404]))
async def retry_job(job_id: str, server: Server, tenant: Tenant) -> Response:
    """Give a job that failed or was cancelled another attempt, from what it had saved."""
    return await _tell(server, server.jobs.store.request_retry, job_id, tenant)


def standing_of(job: Job) -> JobStanding:
    """A job as lists show it."""
    return JobStanding(**_standing(job))


async def _tell(server: ServerState, tell: Callable[[str, str], Job], job_id: str, tenant: str) -> Response:
    job = await server.common.sql.run(tell, job_id, tenant)
    server.jobs.polls.notify([job_id])
    server.jobs.bell.ring()
    return await _answer_job(server.common, server.jobs, job)


async def _answer_job(common: Common, book: JobParts, job: Job) -> Response:
    attempts = await common.sql.run(book.store.attempts, job.id, job.tenant)
    outlook = await common.sql.run(book.outlooks.of, job.id, job.tenant)
    return answer(
        JobResponse(
            **_standing(job),
            spec=shown(job.spec),
            priority=job.priority,
            notify_url=job.notify_url,
            metadata=job.metadata,
            cancel_requested=job.cancel_requested,
            pause_requested=job.pause_requested,
            attempts=[_attempt(one) for one in attempts],
            waits=None if outlook.wait is None else JobWaitInfo(**asdict(outlook.wait)),
            ends_at=outlook.ends_at,
        )
    )


def _standing(job: Job) -> dict[str, Any]:
    failure = job.failure
    chosen = job.client_id if job.client_id and not job.client_id.startswith(REQUEST_PREFIX) else None
    return {
        "id": job.id,
        "kind": job.kind.value,
        "state": job.state.value,
        "is_final": job.state.is_final,
        "name": job.name,
        "client_id": chosen,
        "parent": job.parent,
        "phase": job.phase,
        "progress": job.progress,
        "result": job.result,
        "failure": None
        if failure is None
        else JobFailureInfo(
            code=failure.code,
            message=failure.message,
            is_transient=failure.is_transient,
            field=failure.field,
            details=failure.details,
        ),
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "next_try_at": job.not_before if job.state is JobState.RETRYING else None,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    }


def _attempt(one: JobAttempt) -> JobAttemptInfo:
    return JobAttemptInfo(
        attempt=one.attempt,
        started_at=one.started_at,
        ended_at=one.ended_at,
        outcome=one.outcome,
        reason=one.reason,
    )


def _event(event: JobEvent) -> JobEventInfo:
    return JobEventInfo(number=event.number, time=event.at, kind=event.kind, message=event.message, data=event.data)


def _new_jobs(body: JobsRequest, tenant: str, key: str | None, ids: Mapping[str, str], sealer: Sealer) -> list[NewJob]:
    """The jobs of a request. Each has a name of its own under the request's key, so that a resend finds them again."""
    return [
        new_job(tenant, one, idempotency_key=key and f"{key}:{place}", ids=ids, sealer=sealer, within=f"jobs[{place}]")
        for place, one in enumerate(body.jobs)
    ]
