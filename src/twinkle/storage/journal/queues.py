"""What waits for a mesh, for those who ask where they stand, and whether it moves.

Reads a bounded number of rows of however long a queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState
from twinkle.storage.database import Database, Row, placeholders
from twinkle.storage.journal.turns import RATE_BURST_S, Head, Turn

MAX_LANES = 1000
MAX_OPERATIONS = 10_000
"""Of a mesh's queue, so many are looked at; what lies beyond is told as a lower bound."""

_LEAST_OF_LANE = 10
_RECENT_S = 600.0
_MAX_RECENT = 2000

_LANES = (
    "SELECT l.id, l.tenant, l.nice, l.vtime, l.head_seq, l.max_seq FROM lane l"
    " WHERE l.mesh = ? AND l.head_kind IS NOT NULL ORDER BY l.tenant, l.nice, l.vtime, l.id LIMIT ?"
)
_OPERATIONS = (
    "SELECT o.lane, o.seq, o.kind, o.attempts, o.num_tokens, o.state FROM lane l JOIN operation o"
    " ON o.lane = l.id AND o.seq >= l.head_seq AND o.seq < l.head_seq + ?"
    " WHERE l.id IN ({lanes}) AND o.state IN ('queued', 'running') ORDER BY o.lane, o.seq"
)
_SAMPLES = (
    "SELECT o.lane, o.seq, o.kind, o.attempts, o.num_tokens, o.state, o.tenant, l.nice, l.vtime FROM operation o"
    " JOIN lane l ON l.id = o.lane WHERE o.mesh = ? AND o.kind = 'sample' AND o.state IN ('queued', 'running')"
    " ORDER BY o.lane, o.accepted_at, o.seq LIMIT ?"
)
_RECENT = (
    "SELECT kind, tenant, started_at, finished_at, num_tokens FROM (SELECT mesh, kind, tenant, started_at, finished_at,"
    " num_tokens FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL AND finished_at >= ?"
    " ORDER BY finished_at DESC LIMIT ?) AS r WHERE mesh = ? AND started_at IS NOT NULL"
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """An operation that ended lately, for measuring how fast a mesh is."""

    is_sample: bool
    tenant: str
    started_at: float
    finished_at: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class LaneQueue:
    """The waiting operations of an adapter: from its head to the last one that arrived."""

    lane: str
    tenant: str
    head_seq: int
    max_seq: int


@dataclass(frozen=True, kw_only=True)
class TenantQueue:
    """A tenant with work on a mesh, or that had some lately."""

    tenant: str
    name: str
    weight: float
    paused_until: float


@dataclass(frozen=True, kw_only=True)
class MeshQueue:
    """One look at a mesh's queue: what waits, training operations and samples apart, and what runs, with its tenant.

    ``cut_lanes`` have more waiting than is listed; ``is_complete`` is false where whole lanes are missing.
    """

    mesh: str
    training: list[Head]
    samples: list[Head]
    running: dict[str, str]
    lanes: dict[str, LaneQueue]
    tenants: dict[str, TenantQueue]
    cut_lanes: frozenset[str]
    is_complete: bool
    recent: list[Ended] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class OperationPlace:
    """An operation and its lane, as far as they tell why it waits."""

    request_id: str
    tenant: str
    mesh: str
    lane: str
    seq: int
    kind: OperationKind
    state: OperationState
    attempts: int
    not_before: float
    last_error: str | None
    accepted_at: float
    head_seq: int
    is_head_missing: bool
    gap_since: float | None
    paused_until: float


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A mesh on which an operation could run and nothing has begun or ended for too long."""

    mesh: str
    waits_s: float


class Queues:
    """Looks at queues; changes nothing."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def place(self, request_id: str, tenant: str) -> OperationPlace:
        """Where one operation is.

        Raises:
            NotFound: There is no such future, or it is another tenant's.
        """
        rows = self._database.read(
            "SELECT o.request_id, o.tenant, o.mesh, o.lane, o.seq, o.kind, o.state, o.attempts, o.not_before, o.error,"
            " o.accepted_at, l.head_seq, l.head_kind, l.gap_since, t.paid_until FROM operation o"
            " JOIN lane l ON l.id = o.lane JOIN tenant t ON t.id = o.tenant WHERE o.request_id = ? AND o.tenant = ?",
            (request_id, tenant),
        )
        if not rows:
            raise NotFound(f"no future {request_id!r}")
        row = rows[0]
        return OperationPlace(
            request_id=row.request_id,
            tenant=row.tenant,
            mesh=row.mesh,
            lane=row.lane,
            seq=row.seq,
            kind=OperationKind(row.kind),
            state=OperationState(row.state),
            attempts=row.attempts,
            not_before=row.not_before,
            last_error=row.error,
            accepted_at=row.accepted_at,
            head_seq=row.head_seq,
            is_head_missing=row.head_kind is None,
            gap_since=row.gap_since,
            paused_until=row.paid_until - RATE_BURST_S,
        )

    def look(self, mesh: str) -> MeshQueue:
        """The queue of a mesh as it is now."""
        lanes = self._database.read(_LANES, (mesh, MAX_LANES + 1))
        is_complete = len(lanes) <= MAX_LANES
        lanes = lanes[:MAX_LANES]
        of_lane = max(MAX_OPERATIONS // max(len(lanes), 1), _LEAST_OF_LANE)
        ids = [lane.id for lane in lanes]
        operations = self._database.read(_OPERATIONS.format(lanes=placeholders(ids)), (of_lane, *ids)) if ids else []
        samples = self._database.read(_SAMPLES, (mesh, MAX_OPERATIONS))
        recent = self._recent(mesh)
        names = (
            {lane.tenant for lane in lanes} | {sample.tenant for sample in samples} | {ended.tenant for ended in recent}
        )
        shares = self._shares(mesh, names)
        by_id = {lane.id: lane for lane in lanes}
        training = [(row, by_id[row.lane]) for row in operations]
        drawn = [(row, row) for row in samples]
        return MeshQueue(
            mesh=mesh,
            training=_waiting(training, shares),
            samples=_waiting(drawn, shares),
            running={
                request_id_of(row.lane, row.seq): lane.tenant
                for row, lane in (*training, *drawn)
                if row.state == OperationState.RUNNING
            },
            lanes={
                lane.id: LaneQueue(lane=lane.id, tenant=lane.tenant, head_seq=lane.head_seq, max_seq=lane.max_seq)
                for lane in lanes
            },
            tenants={
                name: TenantQueue(
                    tenant=name, name=share.name, weight=share.weight, paused_until=share.paid_until - RATE_BURST_S
                )
                for name, share in shares.items()
            },
            cut_lanes=frozenset(lane.id for lane in lanes if lane.max_seq - lane.head_seq >= of_lane),
            is_complete=is_complete and len(samples) < MAX_OPERATIONS,
            recent=recent,
        )

    def _recent(self, mesh: str) -> list[Ended]:
        rows = self._database.read(_RECENT, (self._clock.now() - _RECENT_S, _MAX_RECENT, mesh))
        return [
            Ended(
                is_sample=row.kind == OperationKind.SAMPLE,
                tenant=row.tenant,
                started_at=row.started_at,
                finished_at=row.finished_at,
                num_tokens=row.num_tokens,
            )
            for row in rows
        ]

    def _shares(self, mesh: str, tenants: Iterable[str]) -> dict[str, Row]:
        names = sorted(tenants)
        rows = self._database.read(
            "SELECT s.tenant, s.vtime, t.weight, s.lane_vtime, t.name, t.paid_until, m.vtime AS mesh_vtime FROM share s"
            " JOIN tenant t ON t.id = s.tenant JOIN mesh m ON m.name = s.mesh"
            f" WHERE s.mesh = ? AND s.tenant IN ({placeholders(names)})",
            (mesh, *names),
        )
        return {row.tenant: row for row in rows}

    def stalls(self, *, after_s: float) -> list[Stall]:
        """The meshes where the oldest operation that could run or is running has seen nothing move for so long.

        A worker that renews its lease may still be stuck. A lane that waits for a missing number, or for its next
        attempt, waits for no worker.
        """
        now = self._clock.now()
        waiting = self._database.read(
            "SELECT o.mesh, MIN(o.accepted_at) AS oldest, MAX(o.started_at) AS begun"
            " FROM operation o JOIN lane l ON l.id = o.lane"
            " WHERE o.state IN ('queued', 'running') AND o.not_before <= ? AND l.not_before <= ?"
            " AND (o.kind = 'sample' OR o.seq = l.head_seq) GROUP BY o.mesh ORDER BY o.mesh",
            (now, now),
        )
        return [
            Stall(mesh=row.mesh, waits_s=now - row.oldest)
            for row in waiting
            if max(row.oldest, row.begun or 0.0) <= now - after_s
            and not self._has_ended_one(row.mesh, since=now - after_s)
        ]

    def _has_ended_one(self, mesh: str, *, since: float) -> bool:
        rows = self._database.read(
            "SELECT 1 FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"
            " AND finished_at > ? AND mesh = ? LIMIT 1",
            (since, mesh),
        )
        return bool(rows)


def _waiting(rows: list[tuple[Row, Row]], shares: dict[str, Row]) -> list[Head]:
    """Queued operations as heads that a simulation may serve one after the other; those that run count as served."""
    running_tokens: Counter[str] = Counter()
    for row, lane in rows:
        if row.state == OperationState.RUNNING:
            running_tokens[lane.tenant] += row.num_tokens
    turns = {
        name: Turn(
            tenant=name,
            vtime=share.vtime,
            mesh_vtime=share.mesh_vtime,
            lane_vtime=share.lane_vtime,
            weight=share.weight,
            max_running=0,
            num_running_tokens=running_tokens[name],
        )
        for name, share in shares.items()
    }
    return [
        Head(
            turn=turns[lane.tenant],
            lane=row.lane,
            seq=row.seq,
            kind=OperationKind(row.kind),
            suspicions=0,
            num_tokens=row.num_tokens,
            nice=lane.nice,
            vtime=lane.vtime,
            has_next=False,
        )
        for row, lane in rows
        if row.state == OperationState.QUEUED
    ]
