"""OpenAI's fine-tuning API, ``/v1/fine_tuning/jobs``, over the jobs of this service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.job import Job, JobEvent
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.core.places import PlaceInList
from twinkle.server.fine_tuned import MAX_CHECKPOINTS, PREFIX
from twinkle.server.job_submission import new_job, submit_jobs
from twinkle.server.openai.answers import json_answer
from twinkle.server.openai.drawing import find_model
from twinkle.server.openai.fine_tuning_bodies import FIELDS, FineTuningRequest, translate
from twinkle.server.openai.fine_tuning_shapes import (
    METHOD_OF,
    FineTuningCheckpoints,
    FineTuningEvents,
    FineTuningJob,
    FineTuningJobs,
    event_id,
    show,
    show_checkpoint,
    show_event,
)
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import idempotency_key
from twinkle.server.state import Caller, Server, ServerState
from twinkle.storage.checkpoints.checkpoints import Checkpoints
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.jobs import JobRequest
from twinkle.wire.paths import SCHEME, parse_checkpoint_path

_MAX_PAGE = 100
_KEY_HEADER = "Idempotency-Key"

Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
After = Annotated[str | None, Query(max_length=512)]

router = APIRouter(prefix="/fine_tuning/jobs")


@router.post(
    "",
    openapi_extra=described(
        FineTuningJob, body=FineTuningRequest, refusals=[404], headers=[_KEY_HEADER], access=Access.CALLER
    ),
)
async def create_job(request: Request, server: Server, tenant: Caller) -> Response:
    """Fine-tune a model. Its data are looked at before anything is trained."""
    body = parse_body(FineTuningRequest, await server.common.bodies.read(request))
    model = await _origin(server, tenant, body.model)
    await _check_files(server, tenant, body)
    kind, spec = translate(body, model=model)
    wanted = JobRequest(kind=kind.value, spec=spec, metadata=body.metadata or {})
    try:
        new = new_job(
            tenant, wanted, idempotency_key=idempotency_key(request, _KEY_HEADER), ids={}, sealer=server.jobs.sealer
        )
    except InvalidInput as error:
        field = error.field.removeprefix("spec.")
        raise InvalidInput(FIELDS.get(field, field), error.message.removeprefix(f"{error.field}: ")) from error
    (job,) = await submit_jobs(server, tenant, [new])
    return json_answer(show(job))


@router.get("", openapi_extra=described(FineTuningJobs, refusals=[404], access=Access.CALLER))
async def list_jobs(
    request: Request, server: Server, tenant: Caller, limit: Limit = 20, after: After = None
) -> Response:
    """The caller's fine-tunings, newest first."""
    if any(name.startswith("metadata") for name in request.query_params):
        raise InvalidInput("metadata", "jobs cannot be looked up by it here; list them and look at theirs")
    place = None
    if after is not None:
        last = await _find(server, tenant, after)
        place = PlaceInList(created_at=last.created_at, id=last.id)
    page = partial(server.jobs.store.page, tenant, limit=limit + 1, after=place, kinds=list(METHOD_OF))
    found = await server.common.listings.run(tenant, page)
    data = [show(job) for job in found[:limit]]
    return json_answer(FineTuningJobs(object="list", data=data, has_more=len(found) > limit))


@router.get("/{job_id}", openapi_extra=described(FineTuningJob, refusals=[404], access=Access.CALLER))
async def show_job(job_id: str, server: Server, tenant: Caller) -> Response:
    """One fine-tuning."""
    job = await _find(server, tenant, job_id)
    outlook = await server.common.sql.run(server.jobs.outlooks.of, job.id, tenant)
    return json_answer(show(job, ends_at=outlook.ends_at))


@router.post("/{job_id}/cancel", openapi_extra=described(FineTuningJob, refusals=[404], access=Access.CALLER))
async def cancel_job(job_id: str, server: Server, tenant: Caller) -> Response:
    """End a fine-tuning; what it has learnt is left as a checkpoint."""
    return await _tell(server, tenant, job_id, server.jobs.store.request_cancel)


@router.post("/{job_id}/pause", openapi_extra=described(FineTuningJob, refusals=[404], access=Access.CALLER))
async def pause_job(job_id: str, server: Server, tenant: Caller) -> Response:
    """Hold a fine-tuning behind the step that it is at."""
    return await _tell(server, tenant, job_id, server.jobs.store.request_pause)


@router.post("/{job_id}/resume", openapi_extra=described(FineTuningJob, refusals=[404], access=Access.CALLER))
async def resume_job(job_id: str, server: Server, tenant: Caller) -> Response:
    """Let a paused fine-tuning go on."""
    return await _tell(server, tenant, job_id, server.jobs.store.request_resume)


@router.get("/{job_id}/events", openapi_extra=described(FineTuningEvents, refusals=[404], access=Access.CALLER))
async def list_events(job_id: str, server: Server, tenant: Caller, limit: Limit = 20, after: After = None) -> Response:
    """What happened in a fine-tuning, newest first."""
    job = await _find(server, tenant, job_id)
    before = None if after is None else _number_of(job, after)
    look = partial(server.jobs.store.latest_events, job.id, tenant, before=before, limit=limit + 1)
    found = await server.common.sql.run(look)
    data = [show_event(job, event) for event in found[:limit]]
    return json_answer(FineTuningEvents(object="list", data=data, has_more=len(found) > limit))


@router.get(
    "/{job_id}/checkpoints", openapi_extra=described(FineTuningCheckpoints, refusals=[404], access=Access.CALLER)
)
async def list_checkpoints(
    job_id: str, server: Server, tenant: Caller, limit: Limit = 10, after: After = None
) -> Response:
    """The checkpoints of a fine-tuning that are still there, newest first."""
    job = await _find(server, tenant, job_id)
    look = partial(server.jobs.store.latest_events, job.id, tenant, limit=MAX_CHECKPOINTS, kinds=["checkpoint"])
    events = await server.common.sql.run(look)
    checkpoints = server.artifacts.checkpoints
    there = await server.common.sql.run(_still_there, checkpoints, tenant, events)
    shown = [show_checkpoint(job, event) for event in there]
    ids = [one["id"] for one in shown]
    if after is not None and after not in ids:
        raise InvalidInput("after", f"{after!r} is no checkpoint of {job.id}")
    start = 0 if after is None else ids.index(after) + 1
    data = shown[start : start + limit]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    has_more = len(shown) > start + limit
    return json_answer(FineTuningCheckpoints(object="list", data=data, first_id=first, last_id=last, has_more=has_more))


async def _find(server: ServerState, tenant: str, job_id: str) -> Job:
    """A fine-tuning of the caller's.

    Raises:
        NotFound: There is none of this id; other jobs are none.
    """
    job = await server.common.sql.run(server.jobs.store.find, job_id, tenant)
    if job.kind not in METHOD_OF:
        raise NotFound(f"no fine-tuning job {job_id!r}")
    return job


async def _tell(server: ServerState, tenant: str, job_id: str, tell: Callable[[str, str], Job]) -> Response:
    await _find(server, tenant, job_id)
    job = await server.common.sql.run(tell, job_id, tenant)
    server.jobs.polls.notify([job_id])
    server.jobs.bell.ring()
    return json_answer(show(job))


async def _origin(server: ServerState, tenant: str, model: str) -> str:
    """What is trained on: a base model, or the checkpoint behind a name.

    Raises:
        NotFound: No such model is served, or there is no such checkpoint.
        InvalidInput: It is a checkpoint without what training needs.
    """
    if model.startswith(PREFIX):
        model = await server.common.sql.run(server.artifacts.fine_tuned.training_path, model, tenant)
    if model.startswith(SCHEME):
        path = parse_checkpoint_path(model, field="model")
        found = await server.common.sql.run(server.artifacts.checkpoints.find, str(path), tenant=tenant)
        return found.path
    return (await find_model(server.common, server.queue, server.artifacts, tenant, model)).base_model


async def _check_files(server: ServerState, tenant: str, body: FineTuningRequest) -> None:
    """Raises ``InvalidInput`` by its parameter for a file that is not there; data sets of hubs are looked up later."""
    for field, file_id in (("training_file", body.training_file), ("validation_file", body.validation_file)):
        if file_id is None or file_id.startswith(HUB_SCHEMES):
            continue
        try:
            await server.common.sql.run(server.artifacts.files.find, file_id, tenant)
        except NotFound as error:
            raise InvalidInput(field, f"there is no file {file_id!r}; upload one with the purpose fine-tune") from error


def _number_of(job: Job, event: str) -> int:
    number = event.removeprefix(event_id(job, 0).removesuffix("0"))
    if not number.isdecimal():
        raise InvalidInput("after", f"{event!r} is no event of {job.id}")
    return int(number)


def _still_there(checkpoints: Checkpoints, tenant: str, events: list[JobEvent]) -> list[JobEvent]:
    """Of checkpoints that were saved, those that have not been deleted since; each once."""
    there: dict[str, JobEvent] = {}
    for event in events:
        path = event.data["sampler_path"]
        if path not in there and event.data["step"]:
            try:
                checkpoints.find(path, tenant=tenant)
            except NotFound:
                continue
            there[path] = event
    return list(there.values())
