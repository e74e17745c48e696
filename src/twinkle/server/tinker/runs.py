"""Training runs: the adapters as their owner finds them again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from twinkle.server.answering.run_views import RunView, views_of
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import answer, moment
from twinkle.server.tinker.checkpoints import describe
from twinkle.server.tinker.sessions import Limit, Offset
from twinkle.storage.adapters.adapters import Adapter
from twinkle.wire.bodies.checkpoints import Cursor, TrainingRun, TrainingRunsResponse

router = APIRouter()


@router.get("/training_runs", openapi_extra=described(TrainingRunsResponse))
async def list_runs(
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: Annotated[str | None, Query(max_length=4096)] = None,
) -> Response:
    """The tenant's training runs, the one with the latest request first."""
    page, total = await common.listings.run(
        tenant, artifacts.adapters.page, tenant, limit=limit, offset=offset, project_id=project_id
    )
    runs = await common.listings.run(tenant, _describe_all, accounts, artifacts, tenant, page)
    cursor = Cursor(offset=offset, limit=limit, total_count=total)
    return answer(TrainingRunsResponse(training_runs=runs, cursor=cursor))


@router.get("/training_runs/{run_id}", openapi_extra=described(TrainingRun, refusals=[404]))
async def show_run(run_id: str, common: Common, accounts: Accounts, artifacts: Artifacts, tenant: Tenant) -> Response:
    """One training run."""
    run = await common.sql.run(artifacts.adapters.find, run_id, tenant=tenant)
    return answer((await common.listings.run(tenant, _describe_all, accounts, artifacts, tenant, [run]))[0])


def _describe_all(accounts: Accounts, artifacts: Artifacts, tenant: str, runs: list[Adapter]) -> list[TrainingRun]:
    return [_describe(view) for view in views_of(accounts, artifacts, tenant, runs)]


def _describe(view: RunView) -> TrainingRun:
    return TrainingRun(
        training_run_id=view.run.id,
        base_model=view.run.config.base_model,
        model_owner=view.owner,
        is_lora=not view.run.config.is_whole_model,
        lora_rank=view.run.config.rank or None,
        last_request_time=moment(view.last_request_at),
        last_checkpoint=None if view.training is None else describe(view.training),
        last_sampler_checkpoint=None if view.sampler is None else describe(view.sampler),
        user_metadata=view.run.user_metadata,
    )
