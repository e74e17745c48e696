"""Training runs and checkpoints as the Twinkle dialect shows them: those of both dialects, and of their owner alone."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from twinkle.core.adapter import Checkpoint, CheckpointKind
from twinkle.core.errors import InvalidInput
from twinkle.server.answering.run_views import RunView, views_of
from twinkle.server.openapi import Access, described
from twinkle.server.state import AccountParts, Accounts, ArtifactParts, Artifacts, Caller, Common
from twinkle.server.tinker.answers import answer, moment
from twinkle.server.tinker.checkpoints import delete
from twinkle.server.tinker.sessions import MAX_PAGE, Limit, Offset
from twinkle.storage.adapters.adapters import Adapter
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.checkpoints import Cursor
from twinkle.wire.bodies.twinkle import (
    CheckpointPathResponse,
    DeletedCheckpointResponse,
    PathInfoRequest,
    PathInfoResponse,
    RunCheckpoint,
    RunCheckpointsResponse,
    RunInfo,
    RunsResponse,
)
from twinkle.wire.paths import SCHEME, in_other_scheme, parse_checkpoint_path

_SHOWN = (CheckpointKind.TRAINING, CheckpointKind.SAMPLER)
"""Exports to take away are of a kind that this dialect's clients do not know."""

router = APIRouter(prefix="/twinkle")


@router.get("/training_runs", openapi_extra=described(RunsResponse, access=Access.TWINKLE))
async def list_twinkle_runs(
    common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller, limit: Limit = 20, offset: Offset = 0
) -> Response:
    """The caller's training runs, the one with the latest request first."""
    page, total = await common.listings.run(tenant, artifacts.adapters.page, tenant, limit=limit, offset=offset)
    runs = await common.listings.run(tenant, _describe_all, accounts, artifacts, tenant, page)
    cursor = Cursor(limit=limit, offset=offset, total_count=total)
    return answer(RunsResponse(training_runs=runs, cursor=cursor))


@router.get("/training_runs/{run_id}", openapi_extra=described(RunInfo, refusals=[404], access=Access.TWINKLE))
async def show_twinkle_run(
    run_id: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """One training run."""
    run = await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    return answer((await common.listings.run(tenant, _describe_all, accounts, artifacts, tenant, [run]))[0])


@router.get(
    "/training_runs/{run_id}/checkpoints",
    openapi_extra=described(RunCheckpointsResponse, refusals=[404], access=Access.TWINKLE),
)
async def list_twinkle_checkpoints(
    run_id: str, common: Common, artifacts: Artifacts, tenant: Caller, limit: Limit = MAX_PAGE, offset: Offset = 0
) -> Response:
    """The latest of a run's checkpoints behind ``offset``, in the order in which they were saved.

    The last one is the newest: that is where this dialect's clients look for it.
    """
    await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    page, total = await common.listings.run(
        tenant, artifacts.checkpoints.page, tenant, limit=limit, offset=offset, adapter_id=run_id, kinds=_SHOWN
    )
    cursor = Cursor(limit=limit, offset=offset, total_count=total)
    return answer(RunCheckpointsResponse(checkpoints=[_describe(one) for one in reversed(page)], cursor=cursor))


@router.delete(
    "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}",
    openapi_extra=described(DeletedCheckpointResponse, refusals=[404], access=Access.TWINKLE),
)
async def delete_twinkle_checkpoint(
    run_id: str, checkpoint_id: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """Unlist a checkpoint for ever, then remove its files."""
    await delete(common, accounts, artifacts, tenant, _path(run_id, checkpoint_id))
    return answer(DeletedCheckpointResponse(message=f"Checkpoint {checkpoint_id} deleted successfully"))


@router.post(
    "/weights_info",
    openapi_extra=described(PathInfoResponse, body=PathInfoRequest, refusals=[404], access=Access.TWINKLE),
)
async def path_info(
    request: Request, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Caller
) -> Response:
    """What a path's weights are, in either scheme; also of checkpoints that others have published."""
    body = parse_body(PathInfoRequest, await common.bodies.read(request))
    path = str(parse_checkpoint_path(body.twinkle_path, field="twinkle_path"))
    checkpoint = await common.sql.run(artifacts.checkpoints.find, path, tenant=tenant)
    return answer(
        PathInfoResponse(
            training_run_id=checkpoint.adapter,
            base_model=checkpoint.config.base_model,
            model_owner=await common.sql.run(accounts.tenants.name_of, checkpoint.tenant),
            is_lora=not checkpoint.config.is_whole_model,
            lora_rank=checkpoint.config.rank,
        )
    )


@router.get(
    "/checkpoint_path/{run_id}/{checkpoint_id:path}",
    openapi_extra=described(CheckpointPathResponse, refusals=[404], access=Access.TWINKLE),
)
async def checkpoint_path(
    run_id: str, checkpoint_id: str, common: Common, artifacts: Artifacts, tenant: Caller
) -> Response:
    """A checkpoint's path, if there is such a checkpoint."""
    checkpoint = await common.sql.run(artifacts.checkpoints.find, _path(run_id, checkpoint_id), tenant=tenant)
    path = in_other_scheme(checkpoint.path)
    return answer(CheckpointPathResponse(path=path, twinkle_path=path))


def _path(run_id: str, checkpoint_id: str) -> str:
    if checkpoint_id.count("/") != 1:
        raise InvalidInput("checkpoint_id", "must be weights/<name> or sampler_weights/<name>")
    return str(parse_checkpoint_path(f"{SCHEME}{run_id}/{checkpoint_id}", field="checkpoint_id"))


def _describe_all(accounts: AccountParts, artifacts: ArtifactParts, tenant: str, runs: list[Adapter]) -> list[RunInfo]:
    return [_describe_run(view) for view in views_of(accounts, artifacts, tenant, runs)]


def _describe_run(view: RunView) -> RunInfo:
    return RunInfo(
        training_run_id=view.run.id,
        base_model=view.run.config.base_model,
        model_owner=view.owner,
        is_lora=not view.run.config.is_whole_model,
        lora_rank=view.run.config.rank,
        last_request_time=moment(view.last_request_at),
        last_checkpoint=None if view.training is None else _describe(view.training),
        last_sampler_checkpoint=None if view.sampler is None else _describe(view.sampler),
        user_metadata=view.run.user_metadata,
    )


def _describe(checkpoint: Checkpoint) -> RunCheckpoint:
    return RunCheckpoint(
        checkpoint_id=f"{checkpoint.kind.segment}/{checkpoint.name}",
        checkpoint_type="training" if checkpoint.kind is CheckpointKind.TRAINING else "sampler",
        time=moment(checkpoint.created_at),
        size_bytes=checkpoint.size_bytes,
        public=checkpoint.public,
        twinkle_path=in_other_scheme(checkpoint.path),
        base_model=checkpoint.config.base_model,
        is_lora=not checkpoint.config.is_whole_model,
        lora_rank=checkpoint.config.rank,
        train_unembed=checkpoint.config.train_unembed,
        train_mlp=checkpoint.config.train_mlp,
        train_attn=checkpoint.config.train_attn,
        user_metadata=checkpoint.user_metadata,
    )
