"""What waits for a mesh, for those who ask where they stand. Reads a bounded number of rows of however long a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState
from twinkle.storage.database import Database, Row
from twinkle.storage.journal.lanes import placeholders
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
    " num_tokens FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND finished_at >= ?"
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
            request_id=row[0],
            tenant=row[1],
            mesh=row[2],
            lane=row[3],
            seq=row[4],
            kind=OperationKind(row[5]),
            state=OperationState(row[6]),
            attempts=row[7],
            not_before=row[8],
            last_error=row[9],
            accepted_at=row[10],
            head_seq=row[11],
            is_head_missing=row[12] is None,
            gap_since=row[13],
            paused_until=row[14] - RATE_BURST_S,
        )

    def look(self, mesh: str) -> MeshQueue:
        """The queue of a mesh as it is now."""
        lanes = self._database.read(_LANES, (mesh, MAX_LANES + 1))
        is_complete = len(lanes) <= MAX_LANES
        lanes = lanes[:MAX_LANES]
        of_lane = max(MAX_OPERATIONS // max(len(lanes), 1), _LEAST_OF_LANE)
        ids = [row[0] for row in lanes]
        operations = self._database.read(_OPERATIONS.format(lanes=placeholders(ids)), (of_lane, *ids)) if ids else []
        samples = self._database.read(_SAMPLES, (mesh, MAX_OPERATIONS))
        recent = self._recent(mesh)
        names = {row[1] for row in lanes} | {row[6] for row in samples} | {ended.tenant for ended in recent}
        shares = self._shares(mesh, names)
        by_id = {row[0]: row for row in lanes}
        training = [(row, by_id[row[0]][1], by_id[row[0]][2], by_id[row[0]][3]) for row in operations]
        drawn = [(row, row[6], row[7], row[8]) for row in samples]
        return MeshQueue(
            mesh=mesh,
            training=_waiting(training, shares),
            samples=_waiting(drawn, shares),
            running={
                request_id_of(row[0], row[1]): tenant
                for row, tenant, _, _ in (*training, *drawn)
                if row[5] == OperationState.RUNNING
            },
            lanes={row[0]: LaneQueue(lane=row[0], tenant=row[1], head_seq=row[4], max_seq=row[5]) for row in lanes},
            tenants={
                name: TenantQueue(tenant=name, name=row[4], weight=row[2], paused_until=row[5] - RATE_BURST_S)
                for name, row in shares.items()
            },
            cut_lanes=frozenset(row[0] for row in lanes if row[5] - row[4] >= of_lane),
            is_complete=is_complete and len(samples) < MAX_OPERATIONS,
            recent=recent,
        )

    def _recent(self, mesh: str) -> list[Ended]:
        rows = self._database.read(_RECENT, (self._clock.now() - _RECENT_S, _MAX_RECENT, mesh))
        return [
            Ended(
                is_sample=row[0] == OperationKind.SAMPLE,
                tenant=row[1],
                started_at=row[2],
                finished_at=row[3],
                num_tokens=max(row[4], 1),
            )
            for row in rows
        ]

    def _shares(self, mesh: str, tenants: Iterable[str]) -> dict[str, Row]:
        names = sorted(tenants)
        rows = self._database.read(
            "SELECT s.tenant, s.vtime, t.weight, s.lane_vtime, t.name, t.paid_until, m.vtime FROM share s"
            " JOIN tenant t ON t.id = s.tenant JOIN mesh m ON m.name = s.mesh"
            f" WHERE s.mesh = ? AND s.tenant IN ({placeholders(names)})",
            (mesh, *names),
        )
        return {row[0]: row for row in rows}


def _waiting(rows: list[tuple[Row, str, int, float]], shares: dict[str, Row]) -> list[Head]:
    """Queued operations as heads that a simulation may serve one after the other; those that run count as served."""
    running_tokens: Counter[str] = Counter()
    for row, tenant, _, _ in rows:
        if row[5] == OperationState.RUNNING:
            running_tokens[tenant] += row[4]
    turns = {
        name: Turn(
            tenant=name,
            vtime=max(row[1], row[6]),
            weight=row[2],
            max_running=0,
            num_running_tokens=running_tokens[name],
        )
        for name, row in shares.items()
    }
    return [
        Head(
            turn=turns[tenant],
            lane=row[0],
            seq=row[1],
            kind=OperationKind(row[2]),
            suspicions=0,
            num_tokens=row[4],
            nice=nice,
            vtime=max(vtime, shares[tenant][3]),
            has_next=False,
        )
        for row, tenant, nice, vtime in rows
        if row[5] == OperationState.QUEUED
    ]
