"""What tenants used and have stored, from the journal: tokens, device seconds, bytes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database, Row

HOUR_S = 3600
BYTES_PER_GIGABYTE = 10**9

_LIVES = (
    "SELECT c.size_bytes, c.created_at AS begins, c.expires_at AS ends, a.session, a.config, NULL AS base_model"
    " FROM checkpoint c"
    " JOIN adapter a ON a.id = c.adapter WHERE c.tenant = ? AND c.created_at < ?"
    " UNION ALL"
    " SELECT p.size_bytes, p.created_at, p.ended_at, p.session, NULL, p.base_model FROM past_checkpoint p"
    " WHERE p.tenant = ? AND p.created_at < ? AND p.ended_at > ?"
    " UNION ALL"
    " SELECT e.size_bytes, e.opened_at, e.ended_at, e.session, a.config, NULL FROM ephemeral_weights e"
    " JOIN adapter a ON a.id = e.adapter WHERE e.tenant = ? AND e.opened_at < ?"
    " AND (e.ended_at IS NULL OR e.ended_at > ?)"
)
_STORED = (
    "SELECT tenant, adapter, size_bytes, 1 AS is_named FROM checkpoint"
    " WHERE {tenants} AND (expires_at IS NULL OR expires_at > ?)"
    " UNION ALL SELECT tenant, adapter, size_bytes, 0 FROM ephemeral_weights WHERE {tenants} AND ended_at IS NULL"
)
_SUMS = (
    "SUM(k.is_named) AS num_checkpoints, SUM(k.is_named * k.size_bytes) AS size_bytes,"
    " SUM(1 - k.is_named) AS num_ephemeral, SUM((1 - k.is_named) * k.size_bytes) AS ephemeral_bytes"
)


@dataclass(frozen=True)
class UsagePlace:
    """Where something was used: an hour (counted from the epoch), a session, a base model."""

    hour: int
    session: str
    base_model: str


@dataclass
class Work:
    """What was done in one place. Checkpoints are counted as they are written."""

    num_trained: int = 0
    num_prefilled: int = 0
    num_sampled: int = 0
    num_checkpoints: int = 0
    training_device_s: float = 0.0
    sampling_device_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What checkpoints and open nameless weights take up now.

    A copy of a checkpoint counts like any other, though it shares its files; nameless weights count though they lie in
    memory, or are to be made anew: what that takes is kept for them.
    """

    project_id: str | None = None
    num_checkpoints: int
    size_bytes: int
    num_ephemeral: int
    ephemeral_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both together."""
        return self.size_bytes + self.ephemeral_bytes


@dataclass(frozen=True, kw_only=True)
class Present:
    """How much of each a tenant has: live sessions, adapters not unloaded, places to sample from, open operations."""

    num_sessions: int
    num_adapters: int
    num_sampling_sessions: int
    num_open: int


class Accounting:
    """What tenants used, and what they have stored."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def work(self, tenant: str, *, start: float, end: float) -> dict[UsagePlace, Work]:
        """What ended well from ``start`` until before ``end``: failed and cancelled operations cost nothing.

        Of operations that are forgotten it is known by full hours: those that begin in that time are counted.
        """
        # The dialects differ in how a number loses its fraction.
        hour = "TRUNC(o.finished_at / 3600)" if self._database.is_postgres else "CAST(o.finished_at / 3600 AS INTEGER)"
        rows = self._database.read(
            f"SELECT {hour} AS hour, o.kind, COALESCE(a.session, s.session) AS session, a.config, s.base_model,"
            " SUM(o.num_tokens) AS num_tokens, SUM(o.num_prompt_tokens) AS num_prompt_tokens,"
            " SUM(o.device_s) AS device_s, COUNT(*) AS num_operations FROM operation o"
            " LEFT JOIN adapter a ON a.id = o.lane LEFT JOIN sampling_session s ON s.id = o.lane"
            " WHERE o.tenant = ? AND o.state = 'done' AND o.finished_at >= ? AND o.finished_at < ?"
            " AND (a.id IS NOT NULL OR s.id IS NOT NULL)"
            f" GROUP BY {hour}, o.kind, COALESCE(a.session, s.session), a.config, s.base_model"
            # In one statement: what goes from there comes here, in the same transaction.
            " UNION ALL SELECT hour, kind, session, NULL, base_model, num_tokens, num_prompt_tokens, device_s,"
            " num_operations FROM past_work WHERE tenant = ? AND hour >= ? AND hour < ?",
            (tenant, start, end, tenant, start / HOUR_S, end / HOUR_S),
        )
        found: defaultdict[UsagePlace, Work] = defaultdict(Work)
        for row in rows:
            base_model = row.base_model if row.config is None else _base_model_of(row.config)
            _add(found[UsagePlace(int(row.hour), row.session, base_model)], OperationKind(row.kind), row)
        return dict(found)

    def gigabyte_hours(self, tenant: str, *, start: int, end: int) -> dict[UsagePlace, float]:
        """What checkpoints and nameless weights took up in each hour of the window, those that are gone included."""
        end = min(end, int(self._clock.now()) + 1)
        rows = self._database.read(_LIVES, (tenant, end, tenant, end, start, tenant, end, start))
        return _spread(rows, start=start, end=min(end, self._clock.now()))

    def file_gigabyte_hours(self, tenant: str, *, start: int, end: int) -> dict[int, float]:
        """What files took up in each hour of the window, those that are gone included; they belong to no session."""
        end = min(end, int(self._clock.now()) + 1)
        rows = self._database.read(
            "SELECT size_bytes, created_at AS begins, ended_at AS ends FROM file_content WHERE tenant = ?"
            " AND created_at < ? AND (ended_at IS NULL OR ended_at > ?)",
            (tenant, end, start),
        )
        found: defaultdict[int, float] = defaultdict(float)
        for row in rows:
            for hour, gigabyte_hours in _hours_of(row, start=start, end=min(end, self._clock.now())):
                found[hour] += gigabyte_hours
        return dict(found)

    def file_bytes_by_tenant(self) -> dict[str, int]:
        """What files, unfinished uploads and prepared rows take up now, by the tenant's id."""
        rows = self._database.read(
            "SELECT k.tenant, SUM(k.size_bytes) AS size_bytes FROM"
            " (SELECT tenant, size_bytes FROM file_content WHERE ended_at IS NULL"
            " UNION ALL SELECT u.tenant, p.size_bytes FROM upload u JOIN upload_part p ON p.upload = u.id"
            " WHERE u.status = 'pending' UNION ALL SELECT tenant, size_bytes FROM prepared_data) k GROUP BY k.tenant"
        )
        return {row.tenant: int(row.size_bytes) for row in rows}

    def stored(self, tenant: str, *, project_id: str | None = None) -> list[Stored]:
        """What there is now, project by project."""
        rows = self._database.read(
            f"SELECT s.project_id, {_SUMS} FROM ({_STORED.format(tenants='tenant = ?')}) k"
            " JOIN adapter a ON a.id = k.adapter JOIN session s ON s.id = a.session"
            " GROUP BY s.project_id ORDER BY s.project_id",
            (tenant, self._clock.now(), tenant),
        )
        found = [_stored_of(row, project_id=row.project_id) for row in rows]
        return [stored for stored in found if project_id is None or stored.project_id == project_id]

    def stored_by_tenant(self) -> dict[str, Stored]:
        """What there is now of each tenant that has anything, by its id."""
        rows = self._database.read(
            f"SELECT k.tenant, {_SUMS} FROM ({_STORED.format(tenants='TRUE')}) k GROUP BY k.tenant",
            (self._clock.now(),),
        )
        return {row.tenant: _stored_of(row) for row in rows}

    def present(self, tenant: str, *, silent_s: float) -> Present:
        """What a tenant has now; a session that has said nothing for so long lives no more."""
        rows = self._database.read(
            "SELECT (SELECT COUNT(*) FROM session WHERE tenant = ? AND finished_at IS NULL AND heartbeat_at > ?)"
            " AS num_sessions,"
            " (SELECT COUNT(*) FROM adapter a JOIN lane l ON l.id = a.id WHERE a.tenant = ? AND l.ordered"
            " AND l.unload_seq IS NULL) AS num_adapters,"
            " (SELECT COUNT(*) FROM sampling_session p JOIN session s ON s.id = p.session WHERE s.tenant = ?)"
            " AS num_sampling_sessions,"
            " (SELECT COUNT(*) FROM operation WHERE state IN ('queued', 'running') AND tenant = ?) AS num_open",
            (tenant, self._clock.now() - silent_s, tenant, tenant, tenant),
        )
        (row,) = rows
        return Present(
            num_sessions=int(row.num_sessions),
            num_adapters=int(row.num_adapters),
            num_sampling_sessions=int(row.num_sampling_sessions),
            num_open=int(row.num_open),
        )

    def is_cleanup_late(self, *, kept_s: float, late_s: float) -> bool:
        """Whether a result is still there ``late_s`` after the end of the time that results are kept."""
        rows = self._database.read(
            "SELECT 1 AS one FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"
            " AND finished_at < ? LIMIT 1",
            (self._clock.now() - kept_s - late_s,),
        )
        return bool(rows)


def _stored_of(row: Row, *, project_id: str | None = None) -> Stored:
    return Stored(
        project_id=project_id,
        num_checkpoints=int(row.num_checkpoints),
        size_bytes=int(row.size_bytes),
        num_ephemeral=int(row.num_ephemeral),
        ephemeral_bytes=int(row.ephemeral_bytes),
    )


def _add(work: Work, kind: OperationKind, row: Row) -> None:
    if kind is OperationKind.SAMPLE:
        work.num_sampled += int(row.num_tokens)
        work.num_prefilled += int(row.num_prompt_tokens)
        work.sampling_device_s += float(row.device_s)
        return
    work.num_trained += int(row.num_tokens)
    work.training_device_s += float(row.device_s)
    if kind.task_name.startswith(OperationKind.SAVE_WEIGHTS.task_name):
        work.num_checkpoints += int(row.num_operations)


def _spread(lives: Iterable[Row], *, start: float, end: float) -> dict[UsagePlace, float]:
    """Spread sizes over the hours between ``start`` and ``end`` in which they were there."""
    found: defaultdict[UsagePlace, float] = defaultdict(float)
    for life in lives:
        base_model = life.base_model if life.config is None else _base_model_of(life.config)
        for hour, gigabyte_hours in _hours_of(life, start=start, end=end):
            found[UsagePlace(hour, life.session, base_model)] += gigabyte_hours
    return dict(found)


def _hours_of(life: Row, *, start: float, end: float) -> Iterator[tuple[int, float]]:
    """The gigabyte-hours of one thing in each hour between ``start`` and ``end`` in which it was there."""
    begins, ends = max(life.begins, start), end if life.ends is None else min(life.ends, end)
    gigabytes = life.size_bytes / BYTES_PER_GIGABYTE
    for hour in range(int(begins // HOUR_S), int(-(-ends // HOUR_S))):
        seconds = min(ends, (hour + 1) * HOUR_S) - max(begins, hour * HOUR_S)
        if seconds > 0:
            yield hour, gigabytes * seconds / HOUR_S


def _base_model_of(config: str) -> str:
    return str(json.loads(config)["base_model"])
