"""Checkpoints: listed, described, published, given a time to live, deleted."""

from __future__ import annotations

from email.utils import formatdate

import structlog
from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import Checkpoint, CheckpointKind
from twinkle.core.errors import StorageUnavailable
from twinkle.server.connections.mounting import base_url_of
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import NO_CONTENT, answer, moment
from twinkle.server.tinker.sessions import MAX_PAGE, Limit, Offset
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.checkpoints import (
    CheckpointInfo,
    CheckpointsResponse,
    Cursor,
    ExternalWeightsUrlsResponse,
    SetTtlRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from twinkle.wire.paths import SCHEME, parse_checkpoint_path

_FOUND = 302
_CHECKPOINT = "/training_runs/{run_id}/checkpoints/{segment}/{name}"

_log = structlog.get_logger()

router = APIRouter()


def describe(checkpoint: Checkpoint) -> CheckpointInfo:
    """A checkpoint as its owner sees it."""
    return CheckpointInfo(
        checkpoint_id=f"{checkpoint.kind.segment}/{checkpoint.name}",
        checkpoint_type=checkpoint.kind.value,
        time=moment(checkpoint.created_at),
        tinker_path=checkpoint.path,
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        user_metadata=checkpoint.user_metadata,
        expires_at=None if checkpoint.expires_at is None else moment(checkpoint.expires_at),
    )


@router.get("/checkpoints", openapi_extra=described(CheckpointsResponse))
async def list_checkpoints(
    common: Common, artifacts: Artifacts, tenant: Tenant, limit: Limit = 100, offset: Offset = 0
) -> Response:
    """All of the tenant's checkpoints, newest first."""
    page, total = await common.listings.run(tenant, artifacts.checkpoints.page, tenant, limit=limit, offset=offset)
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return answer(CheckpointsResponse(checkpoints=[describe(checkpoint) for checkpoint in page], cursor=cursor))


@router.get("/training_runs/{run_id}/checkpoints", openapi_extra=described(CheckpointsResponse, refusals=[404]))
async def list_checkpoints_of_run(
    run_id: str, common: Common, artifacts: Artifacts, tenant: Tenant, limit: Limit = MAX_PAGE, offset: Offset = 0
) -> Response:
    """A training run's checkpoints, newest first."""
    await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    page, total = await common.listings.run(
        tenant, artifacts.checkpoints.page, tenant, limit=limit, offset=offset, adapter_id=run_id
    )
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return answer(CheckpointsResponse(checkpoints=[describe(checkpoint) for checkpoint in page], cursor=cursor))


@router.post("/weights_info", openapi_extra=described(WeightsInfoResponse, body=WeightsInfoRequest, refusals=[404]))
async def weights_info(request: Request, common: Common, artifacts: Artifacts, tenant: Tenant) -> Response:
    """What a client must know to load a checkpoint."""
    body = parse_body(WeightsInfoRequest, await common.bodies.read(request))
    checkpoint = await common.sql.run(artifacts.checkpoints.find, body.tinker_path, tenant=tenant)
    config = checkpoint.config
    return answer(
        WeightsInfoResponse(
            base_model=config.base_model,
            is_lora=not config.is_whole_model,
            lora_rank=config.rank or None,
            train_unembed=config.train_unembed,
            train_mlp=config.train_mlp,
            train_attn=config.train_attn,
        )
    )


@router.delete(_CHECKPOINT, openapi_extra=described(None, refusals=[404]))
async def delete_checkpoint(
    run_id: str, segment: str, name: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Unlist a checkpoint for ever, then remove its files."""
    await delete(common, accounts, artifacts, tenant, _path(run_id, segment, name))
    return Response(status_code=NO_CONTENT)


@router.post(_CHECKPOINT + "/publish", openapi_extra=described(None, refusals=[404]))
async def publish(
    run_id: str, segment: str, name: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Let every tenant read a checkpoint. Twice is harmless: the 409 of the original makes its client hang."""
    return await _set_public(common, accounts, artifacts, tenant, _path(run_id, segment, name), public=True)


@router.delete(_CHECKPOINT + "/publish", openapi_extra=described(None, refusals=[404]))
async def unpublish(
    run_id: str, segment: str, name: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """Keep a checkpoint to its owner again, at once: URLs that were given out and the sessions of strangers end."""
    return await _set_public(common, accounts, artifacts, tenant, _path(run_id, segment, name), public=False)


async def _set_public(
    common: Common, accounts: Accounts, artifacts: Artifacts, tenant: str, path: str, *, public: bool
) -> Response:
    await common.sql.run(artifacts.checkpoints.set_public, tenant, path, public=public)
    return Response(status_code=NO_CONTENT)


@router.put(_CHECKPOINT + "/ttl", openapi_extra=described(None, body=SetTtlRequest, refusals=[404]))
async def set_ttl(
    run_id: str,
    segment: str,
    name: str,
    request: Request,
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
) -> Response:
    """Change how long a checkpoint lives from now on; null keeps it for ever."""
    body = parse_body(SetTtlRequest, await common.bodies.read(request))
    expires_at = None if body.ttl_seconds is None else common.clock.now() + body.ttl_seconds
    path = _path(run_id, segment, name)
    await common.sql.run(artifacts.checkpoints.set_expiry, tenant, path, expires_at)
    return Response(status_code=NO_CONTENT)


@router.get(
    "/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls",
    openapi_extra=described(ExternalWeightsUrlsResponse, refusals=[404]),
)
async def external_weights_urls(
    run_id: str, name: str, request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant
) -> Response:
    """A URL for each file of an external checkpoint, good for a while without a key."""
    path = _path(run_id, CheckpointKind.EXTERNAL.segment, name)
    checkpoint = await common.sql.run(artifacts.checkpoints.find, path, tenant=tenant)
    urls, expires_at = await common.object_io.run(
        artifacts.links.file_urls_of, checkpoint, reader=tenant, base_url=base_url_of(common.settings, request)
    )
    await _note(common, accounts, tenant, "checkpoint_read", path, purpose="download")
    return answer(ExternalWeightsUrlsResponse(urls=urls, expires=moment(expires_at)))


@router.get(_CHECKPOINT + "/archive", openapi_extra=described(None, status=_FOUND, refusals=[404]))
async def checkpoint_archive(
    run_id: str,
    segment: str,
    name: str,
    request: Request,
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
) -> Response:
    """Where a checkpoint's weights can be read as one tar file for a while without a key: for SDKs before 0.36."""
    path = _path(run_id, segment, name)
    checkpoint = await common.sql.run(artifacts.checkpoints.find, path, tenant=tenant)
    expires_at = artifacts.links.expires_at
    url = artifacts.links.archive_url_of(
        checkpoint, base_url=base_url_of(common.settings, request), expires_at=expires_at
    )
    await _note(common, accounts, tenant, "checkpoint_read", path, purpose="download")
    headers = {"Location": url, "Expires": formatdate(expires_at, usegmt=True), "Cache-Control": "private, no-store"}
    return Response(status_code=_FOUND, headers=headers)


def _path(run_id: str, segment: str, name: str) -> str:
    return str(parse_checkpoint_path(f"{SCHEME}{run_id}/{segment}/{name}"))


async def delete(common: Common, accounts: Accounts, artifacts: Artifacts, tenant: str, path: str) -> None:
    """Unlist a checkpoint for ever, then remove its files.

    Raises:
        NotFound: There is none of this path, or it is another tenant's.
    """
    keys = await common.sql.run(artifacts.checkpoints.delete, tenant, path)
    await _remove_files(common, artifacts, path, keys)


async def _note(common: Common, accounts: Accounts, tenant: str, event: str, path: str, **details: str) -> None:
    await common.sql.run(accounts.audit.note, tenant, event, tinker_path=path, **details)


async def _remove_files(common: Common, artifacts: Artifacts, path: str, keys: list[str]) -> None:
    """The row is gone, so a file that stays behind is one that housekeeping deletes: it was given up with the row."""
    try:
        for key in keys:
            await common.object_io.run(artifacts.blobs.delete, key)
    except StorageUnavailable as error:
        _log.warning("checkpoint.files_left", path=path, error=error.message, next="housekeeping deletes them")
