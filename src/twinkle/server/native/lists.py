"""All of a tenant's training runs and checkpoints, page by page: each is one query, however far down the list."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query, Response

from twinkle.core.places import Place
from twinkle.server.openapi import described
from twinkle.server.state import Accounts, Artifacts, Common, Tenant
from twinkle.server.tinker.answers import answer, moment
from twinkle.server.tinker.checkpoints import describe
from twinkle.wire.bodies.runs import CheckpointsPage, ListedRun, RunsPage

_MAX_PAGE = 1000
_RUNS = "runs"
_CHECKPOINTS = "checkpoints"

Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
CursorText = Annotated[str | None, Query(max_length=8192)]

router = APIRouter()


@router.get("/runs", openapi_extra=described(RunsPage))
async def list_runs(
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
    limit: Limit = 100,
    cursor: CursorText = None,
) -> Response:
    """The caller's training runs, newest first. The next page is behind the cursor that this one gives."""
    after = None if cursor is None else _place(accounts.cursors.read(tenant, _RUNS, cursor))
    found = await common.listings.run(tenant, artifacts.adapters.newest_of, tenant, limit=limit + 1, after=after)
    runs = [
        ListedRun(
            run_id=run.id,
            session_id=run.session,
            base_model=run.config.base_model,
            rank=run.config.rank,
            created_at=moment(run.created_at),
            user_metadata=run.user_metadata,
        )
        for run in found[:limit]
    ]
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else accounts.cursors.write(tenant, _RUNS, last.created_at, last.id)
    return answer(RunsPage(runs=runs, cursor=following))


@router.get("/checkpoints", openapi_extra=described(CheckpointsPage))
async def list_checkpoints(
    common: Common,
    accounts: Accounts,
    artifacts: Artifacts,
    tenant: Tenant,
    limit: Limit = 100,
    cursor: CursorText = None,
) -> Response:
    """The caller's checkpoints, newest first. The next page is behind the cursor that this one gives."""
    after = None if cursor is None else _place(accounts.cursors.read(tenant, _CHECKPOINTS, cursor))
    found = await common.listings.run(tenant, artifacts.checkpoints.newest_of, tenant, limit=limit + 1, after=after)
    last = found[limit - 1] if len(found) > limit else None
    following = None if last is None else accounts.cursors.write(tenant, _CHECKPOINTS, last.created_at, last.path)
    return answer(CheckpointsPage(checkpoints=[describe(one) for one in found[:limit]], cursor=following))


def _place(place: list[str | int | float]) -> Place:
    created_at, id_ = place
    return Place(created_at=float(created_at), id=cast(str, id_))
