"""Sessions: the presence of clients, opened, kept alive by heartbeats, finished, and searched page by page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound, StorageUnavailable
from twinkle.core.ids import new_session_id
from twinkle.core.places import PlaceInList
from twinkle.storage.database import Database, Row, placeholders

_BATCH = 500
_MAX_LOOKED_AT = 5000
# Not their tags, which may be long.
_FOUND_COLUMNS = (
    "id, created_at, heartbeat_at, finished_at, finish_reason, finish_detail, project_id, display_name, user_metadata"
)


_OWNING = ("adapter", "named_adapter", "sampler_template", "sampling_session", "ephemeral_weights", "processor")
_UNUSED = (
    *(f"NOT EXISTS (SELECT 1 FROM {table} x WHERE x.session = s.id)" for table in _OWNING),
    # The lane of its custom losses, which a replay may name as long as there is a journal.
    "NOT EXISTS (SELECT 1 FROM lane x WHERE x.id = s.id || ':loss')",
    # Usage is told by session.
    "NOT EXISTS (SELECT 1 FROM past_work x WHERE x.session = s.id)",
    "NOT EXISTS (SELECT 1 FROM past_checkpoint x WHERE x.session = s.id)",
)
"""What a session is that nothing else refers to."""


@dataclass(frozen=True, kw_only=True)
class NewSession:
    """What ``create_session`` says; the service itself, which opens some for what has no client, says less."""

    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, str] | None = None
    project_id: str | None = None
    display_name: str | None = None
    sdk_version: str = ""
    idempotency_key: str | None = None
    job: str | None = None
    """The job that works in it. It has one session, under this id and no other key."""


@dataclass(frozen=True, kw_only=True)
class FoundSession:
    """A session as it is found. Only a search says what checkpoints there are of it."""

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


@dataclass(frozen=True)
class FoundSessions:
    """A page of a search, and the place behind which it goes on; ``None`` where there is nothing more."""

    sessions: list[FoundSession]
    goes_on_behind: PlaceInList | None


class Sessions:
    """Clients' sessions, tenant by tenant."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def open(self, tenant: str, new: NewSession) -> str:
        """Create a session; the same idempotency key, or the same job, gets the same session."""
        existing = self.opened(tenant, new)
        if existing is not None:
            return existing
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = transaction.execute(
                "INSERT INTO session (id, tenant, idempotency_key, tags, user_metadata, project_id, display_name,"
                " sdk_version, created_at, heartbeat_at, job) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO NOTHING RETURNING id",
                (
                    new_session_id(),
                    tenant,
                    None if new.job else new.idempotency_key,
                    json.dumps(new.tags),
                    None if new.user_metadata is None else json.dumps(new.user_metadata),
                    new.project_id,
                    new.display_name,
                    new.sdk_version,
                    now,
                    now,
                    new.job,
                ),
            ).fetchone()
        # Whoever was first has committed: it is found in a transaction that begins afterwards.
        opened = self.opened(tenant, new) if row is None else str(row.id)
        if opened is None:
            raise StorageUnavailable("another session stood in the way of a new one and is gone; ask again")
        return opened

    def opened(self, tenant: str, new: NewSession) -> str | None:
        """The session that is there already; a job's is found by the job, which no client can name as a key."""
        if new.job is None:
            return self.opened_under(tenant, new.idempotency_key)
        return self._id_of("job", tenant, new.job)

    def opened_under(self, tenant: str, idempotency_key: str | None) -> str | None:
        """The session that was opened under a key, if there is one."""
        return None if idempotency_key is None else self._id_of("idempotency_key", tenant, idempotency_key)

    def _id_of(self, column: str, tenant: str, value: str) -> str | None:
        rows = self._database.read(f"SELECT id FROM session WHERE tenant = ? AND {column} = ?", (tenant, value))
        return str(rows[0].id) if rows else None

    def find(self, tenant: str, session_id: str) -> FoundSession:
        """One of the tenant's sessions.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        rows = self._database.read(
            f"SELECT {_FOUND_COLUMNS} FROM session WHERE id = ? AND tenant = ?", (session_id, tenant)
        )
        if not rows:
            raise _no_session(session_id)
        return _found(rows[0])

    def page(self, tenant: str, *, limit: int, offset: int) -> list[str]:
        """A page of the ids of the tenant's sessions, newest first. What is passed over is walked in an index."""
        rows = self._database.read(
            "SELECT id FROM session WHERE tenant = ? ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?",
            (tenant, limit, offset),
        )
        return [row.id for row in rows]

    def set_project(self, tenant: str, session_id: str, project_id: str) -> None:
        """Put a session into a project.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        if not self._change(tenant, session_id, "project_id = ?", project_id):
            raise _no_session(session_id)

    def heartbeat(self, tenant: str, session_id: str) -> bool:
        """Note a sign of life; false when the session was finished and its client may stop.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        is_alive = self._change(tenant, session_id, "heartbeat_at = ?", self._clock.now(), only="finished_at IS NULL")
        if not is_alive:
            self.find(tenant, session_id)
        return is_alive

    def finish(self, tenant: str, session_id: str, *, reason: str, detail: str | None) -> None:
        """Note how a client ended; the first report wins.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        ended = "finished_at = ?, finish_reason = ?, finish_detail = ?"
        facts = (self._clock.now(), reason, detail)
        if not self._change(tenant, session_id, ended, *facts, only="finished_at IS NULL"):
            self.find(tenant, session_id)

    def _change(self, tenant: str, session_id: str, assignments: str, *values: object, only: str = "TRUE") -> bool:
        """Whether there was a session to change."""
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                f"UPDATE session SET {assignments} WHERE id = ? AND tenant = ? AND {only}",
                (*values, session_id, tenant),
            ).rowcount
        return changed == 1

    def forget(self, *, older_than_s: float) -> int:
        """Delete sessions that ended or fell silent so long ago, and of which nothing else is kept; how many."""
        before = self._clock.now() - older_than_s
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                "DELETE FROM session WHERE id IN (SELECT s.id FROM session s WHERE s.heartbeat_at <= ?"
                " AND s.created_at <= ?"
                " AND (s.job IS NULL OR NOT EXISTS (SELECT 1 FROM job x WHERE x.id = s.job))"
                f" AND {' AND '.join(_UNUSED)} ORDER BY s.heartbeat_at LIMIT ?) RETURNING id",
                (before, before, _BATCH),
            ).fetchall()
            ids = [row.id for row in rows]
            transaction.execute(f"DELETE FROM gone_lane WHERE session IN ({placeholders(ids)})", ids)
        return len(ids)

    def search(
        self, tenant: str, matches: Callable[[FoundSession], bool], *, limit: int, after: PlaceInList | None
    ) -> FoundSessions:
        """At most ``limit`` of the tenant's sessions that match, those behind ``after`` if that is given.

        No more than a few thousand are looked at: where that ends before the page is full, it goes on from there.
        """
        found: list[FoundSession] = []
        last: PlaceInList | None = None
        for num_looked_at, session in enumerate(self._newest_first(tenant, after)):
            is_wanted = matches(session)
            if num_looked_at == _MAX_LOOKED_AT or (is_wanted and len(found) == limit):
                return FoundSessions(self._with_checkpoints(found), last)
            last = PlaceInList(created_at=session.created_at, id=session.id)
            if is_wanted:
                found.append(session)
        return FoundSessions(self._with_checkpoints(found), None)

    def _newest_first(self, tenant: str, after: PlaceInList | None) -> Iterator[FoundSession]:
        last = after
        while True:
            behind = "" if last is None else "AND (created_at < ? OR (created_at = ? AND id < ?))"
            rows = self._database.read(
                f"SELECT {_FOUND_COLUMNS} FROM session WHERE tenant = ? {behind}"
                " ORDER BY created_at DESC, id DESC LIMIT ?",
                (tenant, *(() if last is None else (last.created_at, last.created_at, last.id)), _BATCH),
            )
            yield from (_found(row) for row in rows)
            if len(rows) < _BATCH:
                return
            last = PlaceInList(created_at=rows[-1].created_at, id=rows[-1].id)

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


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r}")


def _found(row: Row) -> FoundSession:
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
