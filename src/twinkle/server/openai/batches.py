"""OpenAI's Batch API, ``/v1/batches``: a file of requests that the service answers while nobody waits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.core.errors import NotFound
from twinkle.core.ids import new_id
from twinkle.core.job import Job, JobKind
from twinkle.core.places import PlaceInList
from twinkle.server.job_submission import new_job, submit_jobs
from twinkle.server.openai.answers import json_answer
from twinkle.server.openai.batch_shapes import WINDOW_S, BatchList, BatchObject, CreateBatchRequest, show
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import idempotency_key
from twinkle.server.state import Caller, Server, ServerState
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.jobs import JobRequest
from twinkle.wire.bodies.jobs_batch import BatchSpec

_MAX_PAGE = 100
_KEY_HEADER = "Idempotency-Key"

router = APIRouter(prefix="/batches")


@router.post(
    "",
    openapi_extra=described(
        BatchObject, body=CreateBatchRequest, refusals=[404], headers=[_KEY_HEADER], access=Access.CALLER
    ),
)
async def create_batch(request: Request, server: Server, tenant: Caller) -> Response:
    """Answer a file of requests. All lines are looked at before the first one is asked."""
    body = parse_body(CreateBatchRequest, await server.common.bodies.read(request))
    keep_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    spec = BatchSpec(data=body.input_file_id, endpoint=body.endpoint, output_expires_after_s=keep_s)
    wanted = JobRequest(kind=JobKind.BATCH.value, spec=spec.model_dump(exclude_none=True), metadata=body.metadata or {})
    new = new_job(
        tenant, wanted, idempotency_key=idempotency_key(request, _KEY_HEADER), ids={}, sealer=server.jobs.sealer
    )
    expires_at = server.common.clock.now() + WINDOW_S
    (job,) = await submit_jobs(server, tenant, [replace(new, id=f"batch_{new_id()}", expires_at=expires_at)])
    return json_answer(show(job))


@router.get("", openapi_extra=described(BatchList, refusals=[404], access=Access.CALLER))
async def list_batches(
    server: Server,
    tenant: Caller,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE)] = 20,
    after: Annotated[str | None, Query(max_length=512)] = None,
) -> Response:
    """The caller's batches, newest first."""
    place = None
    if after is not None:
        last = await _find(server, tenant, after)
        place = PlaceInList(created_at=last.created_at, id=last.id)
    page = partial(server.jobs.store.page, tenant, limit=limit + 1, after=place, kinds=[JobKind.BATCH])
    found = await server.common.listings.run(tenant, page)
    data = [show(job) for job in found[:limit]]
    first, last_id = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = len(found) > limit
    return json_answer(BatchList(object="list", data=data, first_id=first, last_id=last_id, has_more=has_more))


@router.get("/{batch_id}", openapi_extra=described(BatchObject, refusals=[404], access=Access.CALLER))
async def show_batch(batch_id: str, server: Server, tenant: Caller) -> Response:
    """One batch."""
    return json_answer(show(await _find(server, tenant, batch_id)))


@router.post("/{batch_id}/cancel", openapi_extra=described(BatchObject, refusals=[404], access=Access.CALLER))
async def cancel_batch(batch_id: str, server: Server, tenant: Caller) -> Response:
    """End a batch: what was answered is kept. One that has ended is left as it is."""
    job = await _find(server, tenant, batch_id)
    job = await server.common.sql.run(server.jobs.store.request_cancel, job.id, tenant)
    server.jobs.polls.notify([job.id])
    server.jobs.bell.ring()
    return json_answer(show(job))


async def _find(server: ServerState, tenant: str, batch_id: str) -> Job:
    """A batch of the caller's.

    Raises:
        NotFound: There is none of this id; other jobs are none.
    """
    job = await server.common.sql.run(server.jobs.store.find, batch_id, tenant)
    if job.kind is not JobKind.BATCH:
        raise NotFound(f"no batch {batch_id!r}")
    return job
