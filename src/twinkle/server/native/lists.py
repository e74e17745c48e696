"""All of a tenant's training runs and checkpoints, page by page: each is one query, however far down the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Response

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

_Listed = TypeVar("_Listed")


@dataclass(frozen=True)
class _Asked:
    """What both lists are asked with."""

    common: Common
    accounts: Accounts
    artifacts: Artifacts
    tenant: Tenant
    limit: Limit = 100
    cursor: CursorText = None

    async def page(self, what: str, read: Callable[..., list[_Listed]]) -> tuple[list[_Listed], _Listed | None]:
        """The page, and the last of it if there is more behind it."""
        after = None if self.cursor is None else self.accounts.cursors.read(self.tenant, what, self.cursor)
        found = await self.common.listings.run(self.tenant, read, self.tenant, limit=self.limit + 1, after=after)
        return found[: self.limit], found[self.limit - 1] if len(found) > self.limit else None

    def cursor_behind(self, what: str, created_at: float, id_: str) -> str:
        """What the next page is asked with."""
        return self.accounts.cursors.write(self.tenant, what, created_at, id_)


Asked = Annotated[_Asked, Depends()]

router = APIRouter()


@router.get("/runs", openapi_extra=described(RunsPage))
async def list_runs(asked: Asked) -> Response:
    """The caller's training runs, newest first. The next page is behind the cursor that this one gives."""
    found, last = await asked.page(_RUNS, asked.artifacts.adapters.newest_of)
    runs = [
        ListedRun(
            run_id=run.id,
            session_id=run.session,
            base_model=run.config.base_model,
            rank=run.config.rank,
            created_at=moment(run.created_at),
            user_metadata=run.user_metadata,
        )
        for run in found
    ]
    following = None if last is None else asked.cursor_behind(_RUNS, last.created_at, last.id)
    return answer(RunsPage(runs=runs, cursor=following))


@router.get("/checkpoints", openapi_extra=described(CheckpointsPage))
async def list_checkpoints(asked: Asked) -> Response:
    """The caller's checkpoints, newest first. The next page is behind the cursor that this one gives."""
    found, last = await asked.page(_CHECKPOINTS, asked.artifacts.checkpoints.newest_of)
    following = None if last is None else asked.cursor_behind(_CHECKPOINTS, last.created_at, last.path)
    return answer(CheckpointsPage(checkpoints=[describe(one) for one in found], cursor=following))
