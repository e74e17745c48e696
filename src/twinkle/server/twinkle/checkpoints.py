"""Checkpoints of models' adapters: saved under names, loaded by paths of the tenant's, pushed to hubs by jobs."""

from __future__ import annotations

import hashlib
from functools import partial

from fastapi import APIRouter, Request, Response

from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.job import Job, JobKind, JobState
from twinkle.core.model_names import HUB_SCHEMES
from twinkle.core.operation import Payload, Unnumbered
from twinkle.server.job_submission import new_job, submit_jobs
from twinkle.server.openapi import Access, described
from twinkle.server.receiving.request_metadata import HEADER, idempotency_key
from twinkle.server.state import Caller, Server, ServerState
from twinkle.server.tinker.answers import answer
from twinkle.server.tinker.grants import TOKEN_HEADER, grant_of
from twinkle.server.twinkle.adapters import address_of, mesh_of_model
from twinkle.server.twinkle.calls import answer_call
from twinkle.server.twinkle.folders import brought_in, is_folder
from twinkle.server.twinkle.model import CALL_HEADERS, RESULT, ModelName
from twinkle.storage.adapters.named import AdapterAddress
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.jobs import JobRequest
from twinkle.wire.bodies.twinkle_calls import (
    CallTicket,
    LoadRequest,
    SavedCheckpoint,
    SavedResponse,
    SaveRequest,
    UploadRequest,
    UploadState,
    UploadStatus,
    UploadTicket,
)
from twinkle.wire.calls import CALL_KINDS, Call, encode_call
from twinkle.wire.digest import body_digest
from twinkle.wire.paths import parse_checkpoint_path
from twinkle.wire.twinkle_requests import NO_FOLDERS, checkpoint_name, checkpoint_path

_NO_FOLDER = "is a folder of a disk, and checkpoints are kept in the server's store; leave it out"
_WEIGHTS_ALONE = "of a folder only the weights are taken; load a checkpoint to go on with its optimizer"
_STATUS_OF_STATE: dict[JobState, UploadState] = {
    JobState.SUCCEEDED: "completed",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "failed",
}

_MAX_JOB_NAME = 512

router = APIRouter(prefix="/model")


@router.post(
    "/{base_model:path}/twinkle/save",
    openapi_extra=described(
        SavedResponse,
        body=SaveRequest,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=CALL_HEADERS,
        access=Access.TWINKLE,
    ),
)
async def save(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """A checkpoint of an adapter, which takes the place of one of its name."""
    body = parse_body(SaveRequest, await server.common.bodies.read(request))
    if body.output_dir is not None:
        raise InvalidInput("output_dir", _NO_FOLDER)
    arguments = body.model_dump(exclude={"adapter_name", "output_dir"}, exclude_none=True)
    arguments["name"] = checkpoint_name(body.name)
    lane = (await address_of(request, server, tenant, base_model, body.adapter_name)).id
    return await _answer(request, server, tenant, lane, Call(method="save", arguments=arguments), body_digest(body))


@router.post(
    "/{base_model:path}/twinkle/load",
    openapi_extra=described(
        RESULT,
        body=LoadRequest,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=[*CALL_HEADERS, TOKEN_HEADER],
        access=Access.TWINKLE,
    ),
)
async def load(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Put a checkpoint's weights into an adapter, with the optimizer's state if that is wanted."""
    body = parse_body(LoadRequest, await server.common.bodies.read(request))
    return await _load(request, server, tenant, base_model, body, {"load_optimizer": body.load_optimizer})


@router.post(
    "/{base_model:path}/twinkle/resume_from_checkpoint",
    openapi_extra=described(
        RESULT,
        body=LoadRequest,
        others={202: CallTicket},
        refusals=[404, 500],
        headers=[*CALL_HEADERS, TOKEN_HEADER],
        access=Access.TWINKLE,
    ),
)
async def resume_from_checkpoint(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Let an adapter go on as a checkpoint was, and say how far that had come."""
    body = parse_body(LoadRequest, await server.common.bodies.read(request))
    return await _load(request, server, tenant, base_model, body, {"resume_only_model": body.resume_only_model})


@router.post(
    "/{base_model:path}/twinkle/upload_to_hub",
    openapi_extra=described(UploadTicket, body=UploadRequest, refusals=[404], headers=[HEADER], access=Access.TWINKLE),
)
async def upload_to_hub(base_model: ModelName, request: Request, server: Server, tenant: Caller) -> Response:
    """Push a checkpoint to a hub, by a job of the service's: retried, and listed among the caller's jobs."""
    body = parse_body(UploadRequest, await server.common.bodies.read(request))
    await mesh_of_model(server, base_model)
    given = body.checkpoint_dir
    text = given.twinkle_path if isinstance(given, SavedCheckpoint) else given
    path = str(parse_checkpoint_path(text, field="checkpoint_dir"))
    await server.common.sql.run(partial(server.artifacts.checkpoints.find, path, tenant=tenant))
    target = body.hub_model_id if body.hub_model_id.startswith(HUB_SCHEMES) else f"{HUB_SCHEMES[0]}{body.hub_model_id}"
    spec = {"checkpoint": path, "forms": ["peft"], "to": target, "private": body.private, "hub_token": body.hub_token}
    job = JobRequest(
        kind=JobKind.EXPORT.value,
        spec={key: value for key, value in spec.items() if value is not None},
        name=f"upload to {target}"[:_MAX_JOB_NAME],
    )
    new = new_job(tenant, job, idempotency_key=idempotency_key(request), ids={}, sealer=server.jobs.sealer)
    taken_on = (await submit_jobs(server, tenant, [new]))[0]
    return answer(UploadTicket(request_id=taken_on.id))


@router.get(
    "/{base_model:path}/twinkle/upload_status/{request_id}",
    openapi_extra=described(UploadStatus, refusals=[404], access=Access.TWINKLE),
)
async def upload_status(base_model: ModelName, request_id: str, server: Server, tenant: Caller) -> Response:
    """How an upload stands."""
    await mesh_of_model(server, base_model)
    job = await server.common.sql.run(server.jobs.store.find, request_id, tenant)
    if job.kind is not JobKind.EXPORT:
        raise NotFound(f"no upload {request_id!r}")
    return answer(UploadStatus(request_id=job.id, status=_state_of(job), error=_error_of(job)))


async def _load(
    request: Request, server: ServerState, tenant: str, base_model: str, body: LoadRequest, how: dict[str, object]
) -> Response:
    method = "load" if "load_optimizer" in how else "resume_from_checkpoint"
    address = await address_of(request, server, tenant, base_model, body.adapter_name)
    lane = address.id
    if is_folder(body.name):
        arguments = await _from_folder(request, server, tenant, address, body, method) | how
    else:
        path = checkpoint_path(body.name, run_id=lane)
        arguments = {"path": str(path), **how}
        if path.run_id != lane:
            arguments |= await _binding(request, server, tenant, str(path))
    # What a path means may change between a call and its resend; what was asked does not.
    digest = body_digest(body)
    return await _answer(request, server, tenant, lane, Call(method=method, arguments=arguments), digest)


async def _from_folder(
    request: Request, server: ServerState, tenant: str, address: AdapterAddress, body: LoadRequest, method: str
) -> dict[str, object]:
    """What a folder holds now, as a checkpoint. That of a resend was settled when the call first came.

    Raises:
        InvalidInput: More than weights is wanted, or the folder cannot be had.
    """
    if not server.artifacts.folders.are_any:
        raise InvalidInput("name", NO_FOLDERS)
    if (body.load_optimizer, method) == (True, "load"):
        raise InvalidInput("load_optimizer", _WEIGHTS_ALONE)
    if (body.resume_only_model, method) == (False, "resume_from_checkpoint"):
        raise InvalidInput("resume_only_model", f"must be true here: {_WEIGHTS_ALONE}")
    key = idempotency_key(request)
    if key is not None and await server.common.sql.run(server.artifacts.named_adapters.was_accepted, address.id, key):
        return {"path": body.name}
    checkpoint = await brought_in(
        request, server, tenant, body.name, base_model=address.base_model, mesh=address.mesh, field="name"
    )
    return {"path": checkpoint.path, "content": checkpoint.content}


async def _binding(request: Request, server: ServerState, tenant: str, path: str) -> dict[str, object]:
    """What a path means now, and by whose leave. A run's own checkpoints are found when it is the load's turn."""
    grant = await grant_of(
        server.common, server.artifacts, tenant, path, request.headers.get(TOKEN_HEADER), purpose="load"
    )
    try:
        find = partial(server.artifacts.checkpoints.find, path, tenant=tenant, grant=grant)
        checkpoint = await server.common.sql.run(find)
    except NotFound:
        # A resend finds its future all the same; anything else fails in its turn.
        return {}
    return {"content": checkpoint.content, "grant": None if grant is None else grant.model_dump()}


async def _answer(request: Request, server: ServerState, tenant: str, lane: str, call: Call, digest: str) -> Response:
    key = f"{call.method} {digest}"
    return await answer_call(
        request,
        server,
        Unnumbered(
            tenant=tenant,
            lane=lane,
            kind=CALL_KINDS[call.method],
            digest=hashlib.sha256(key.encode()).hexdigest(),
            payload=Payload(inline=encode_call(call)),
            request_key=idempotency_key(request),
        ),
    )


def _state_of(job: Job) -> UploadState:
    return _STATUS_OF_STATE.get(job.state, "running" if job.started_at is not None else "pending")


def _error_of(job: Job) -> str | None:
    if job.failure is not None:
        return job.failure.message
    return "the upload was cancelled" if job.state is JobState.CANCELLED else None
