"""The search among a tenant's sessions, newest first, page by page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, Engine
from sqlmodel import Session, and_, col, or_, select

from twinkle.storage.database import Database
from twinkle.storage.journal.lanes import placeholders
from twinkle.storage.tables import SessionRow

_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class FoundSession:
    """A session as the search shows it."""

    id: str
    created_at: float
    heartbeat_at: float
    finished_at: float | None
    finish_reason: str | None
    finish_detail: str | None
    project_id: str | None
    display_name: str | None
    user_metadata: dict[str, str] | None
    num_checkpoints: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place among a tenant's sessions: behind this one, which need not be there."""

    created_at: float
    id: str


class SessionSearch:
    """Finds sessions."""

    def __init__(self, database: Database, engine: Engine) -> None:
        self._database = database
        self._engine = engine

    def find(
        self, tenant: str, matches: Callable[[FoundSession], bool], *, limit: int, after: Place | None
    ) -> list[FoundSession]:
        """At most ``limit`` of the tenant's sessions that match, those behind ``after`` if that is given."""
        found = []
        for session in self._newest_first(tenant, after):
            if matches(session):
                found.append(session)
                if len(found) == limit:
                    break
        return self._with_checkpoints(found)

    def _newest_first(self, tenant: str, after: Place | None) -> Iterator[FoundSession]:
        with Session(self._engine) as session:
            statement = select(SessionRow).where(SessionRow.tenant == tenant)
            last = after
            order = (col(SessionRow.created_at).desc(), col(SessionRow.id).desc())
            while True:
                page = statement if last is None else statement.where(_is_older(last))
                rows = session.exec(page.order_by(*order).limit(_BATCH)).all()
                yield from (_found(row) for row in rows)
                if len(rows) < _BATCH:
                    return
                last = Place(created_at=rows[-1].created_at, id=rows[-1].id)

    def _with_checkpoints(self, sessions: list[FoundSession]) -> list[FoundSession]:
        ids = [session.id for session in sessions]
        rows = self._database.read(
            "SELECT a.session, COUNT(*) AS num, SUM(c.size_bytes) AS size_bytes FROM checkpoint c"
            f" JOIN adapter a ON a.id = c.adapter WHERE a.session IN ({placeholders(ids)}) AND c.listed"
            " GROUP BY a.session",
            ids,
        )
        counts = {row.session: row for row in rows}
        return [
            replace(
                session,
                num_checkpoints=int(counts[session.id].num),
                checkpoint_bytes=int(counts[session.id].size_bytes),
            )
            if session.id in counts
            else session
            for session in sessions
        ]


def _is_older(last: Place) -> ColumnElement[bool]:
    return or_(
        col(SessionRow.created_at) < last.created_at,
        and_(col(SessionRow.created_at) == last.created_at, col(SessionRow.id) < last.id),
    )


def _found(row: SessionRow) -> FoundSession:
    return FoundSession(
        id=row.id,
        created_at=row.created_at,
        heartbeat_at=row.heartbeat_at,
        finished_at=row.finished_at,
        finish_reason=row.finish_reason,
        finish_detail=row.finish_detail,
        project_id=row.project_id,
        display_name=row.display_name,
        user_metadata=None if row.user_metadata is None else json.loads(row.user_metadata),
    )
