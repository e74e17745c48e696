"""What a tenant used, from the journal: tokens trained, prefilled and sampled, device seconds, bytes stored."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database, Row

HOUR_S = 3600
BYTES_PER_GIGABYTE = 10**9

_LIVES = (
    "SELECT c.size_bytes, c.created_at, c.expires_at, a.session, a.config FROM checkpoint c"
    " JOIN adapter a ON a.id = c.adapter WHERE c.tenant = ? AND c.created_at < ?"
    " UNION ALL"
    " SELECT p.size_bytes, p.created_at, p.ended_at, a.session, a.config FROM past_checkpoint p"
    " JOIN adapter a ON a.id = p.adapter WHERE p.tenant = ? AND p.created_at < ? AND p.ended_at > ?"
    " UNION ALL"
    " SELECT e.size_bytes, e.opened_at, e.ended_at, e.session, a.config FROM ephemeral_weights e"
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
class Place:
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


class Usage:
    """A tenant's account."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def work(self, tenant: str, *, start: float, end: float) -> dict[Place, Work]:
        """What ended well from ``start`` until before ``end``: failed and cancelled operations cost nothing."""
        # The dialects differ in how a number loses its fraction.
        hour = "TRUNC(o.finished_at / 3600)" if self._database.is_postgres else "CAST(o.finished_at / 3600 AS INTEGER)"
        rows = self._database.read(
            f"SELECT {hour}, o.kind, COALESCE(a.session, s.session), a.config, s.base_model, SUM(o.num_tokens),"
            " SUM(o.num_prompt_tokens), SUM(o.device_s), COUNT(*) FROM operation o"
            " LEFT JOIN adapter a ON a.id = o.lane LEFT JOIN sampling_session s ON s.id = o.lane"
            " WHERE o.tenant = ? AND o.state = 'done' AND o.finished_at >= ? AND o.finished_at < ?"
            " AND (a.id IS NOT NULL OR s.id IS NOT NULL)"
            f" GROUP BY {hour}, o.kind, COALESCE(a.session, s.session), a.config, s.base_model",
            (tenant, start, end),
        )
        found: defaultdict[Place, Work] = defaultdict(Work)
        for row in rows:
            base_model = row[4] if row[3] is None else _base_model_of(row[3])
            _add(found[Place(int(row[0]), row[2], base_model)], OperationKind(row[1]), row)
        return dict(found)

    def gigabyte_hours(self, tenant: str, *, start: int, end: int) -> dict[Place, float]:
        """What checkpoints and nameless weights took up in each hour of the window, those that are gone included."""
        end = min(end, int(self._clock.now()) + 1)
        rows = self._database.read(_LIVES, (tenant, end, tenant, end, start, tenant, end, start))
        now = self._clock.now()
        lives = ((row[0], max(row[1], start), min(row[2] or now, now, end), row[3], row[4]) for row in rows)
        return _spread(life for life in lives if life[2] > life[1])

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


def _stored_of(row: Row, *, project_id: str | None = None) -> Stored:
    return Stored(
        project_id=project_id,
        num_checkpoints=int(row.num_checkpoints),
        size_bytes=int(row.size_bytes),
        num_ephemeral=int(row.num_ephemeral),
        ephemeral_bytes=int(row.ephemeral_bytes),
    )


def _add(work: Work, kind: OperationKind, row: Row) -> None:
    num_tokens, num_prompt_tokens, device_s, count = int(row[5]), int(row[6]), float(row[7]), int(row[8])
    if kind is OperationKind.SAMPLE:
        work.num_sampled += num_tokens
        work.num_prefilled += num_prompt_tokens
        work.sampling_device_s += device_s
        return
    work.num_trained += num_tokens
    work.training_device_s += device_s
    if kind.task_name.startswith(OperationKind.SAVE_WEIGHTS.task_name):
        work.num_checkpoints += count


def _spread(lives: Iterable[tuple[int, float, float, str, str]]) -> dict[Place, float]:
    """Spread sizes over the hours in which they were there: ``(size_bytes, from, until, session, config)``."""
    found: defaultdict[Place, float] = defaultdict(float)
    for size_bytes, begins, ends, session, config in lives:
        base_model = _base_model_of(config)
        gigabytes = size_bytes / BYTES_PER_GIGABYTE
        for hour in range(int(begins // HOUR_S), int(-(-ends // HOUR_S))):
            seconds = min(ends, (hour + 1) * HOUR_S) - max(begins, hour * HOUR_S)
            found[Place(hour, session, base_model)] += gigabytes * seconds / HOUR_S
    return dict(found)


def _base_model_of(config: str) -> str:
    return str(json.loads(config)["base_model"])
