"""Runs, data sets and sampling sessions that ended long ago go, each with what is left of its operations.

Of each its id stays, as long as its client's session does: whatever comes for it is answered that it is gone, and
nothing else is ever made under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind, OperationState
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.lanes import NO_MESH, lock_lanes
from twinkle.storage.tenants.audit import TOLD_BY_OPERATIONS, keep
from twinkle.storage.upkeep.forgetting import FORGOTTEN_COLUMNS, delete_operations, note_usage
from twinkle.storage.upkeep.waste import doom

SHARED_SESSION_KEY = "openai"
"""The idempotency key of the one session of a tenant's requests that come without a session. It never falls silent."""

_LANES_A_LOOK = 1000
_OPERATIONS_A_STEP = 500
_RUN = (
    "l.head_kind IS NULL AND l.moving_to IS NULL"
    # A copy of a checkpoint is a run without an order.
    " AND (NOT l.ordered OR (l.unload_seq IS NOT NULL AND l.head_seq > l.unload_seq))"
    " AND EXISTS (SELECT 1 FROM adapter a WHERE a.id = l.id AND a.created_at <= ?)"
    " AND NOT EXISTS (SELECT 1 FROM checkpoint c WHERE c.adapter = l.id)"
    " AND NOT EXISTS (SELECT 1 FROM past_checkpoint p WHERE p.adapter = l.id AND p.ended_at > ?)"
    " AND NOT EXISTS (SELECT 1 FROM branch b WHERE b.source = l.id AND b.adapter <> l.id)"
    " AND NOT EXISTS (SELECT 1 FROM ephemeral_weights e WHERE e.adapter = l.id)"
    " AND NOT EXISTS (SELECT 1 FROM access_token t WHERE t.adapter = l.id)"
)
_SAMPLER = (
    "EXISTS (SELECT 1 FROM sampling_session p JOIN session s ON s.id = p.session WHERE p.id = l.id"
    " AND NOT EXISTS (SELECT 1 FROM ephemeral_weights e WHERE e.sampling_session = p.id"
    " AND (e.ended_at IS NULL OR e.pinned OR e.ended_at > ?))"
    " AND NOT EXISTS (SELECT 1 FROM job j WHERE j.id = s.job AND j.finished_at IS NULL)"
    f" AND ((s.heartbeat_at <= ? AND COALESCE(s.idempotency_key, '') <> '{SHARED_SESSION_KEY}')"
    # Its checkpoint is gone: nothing is sampled from it any more.
    " OR (EXISTS (SELECT 1 FROM past_checkpoint x WHERE x.path = p.checkpoint AND x.ended_at <= ?)"
    " AND NOT EXISTS (SELECT 1 FROM past_checkpoint x WHERE x.path = p.checkpoint AND x.ended_at > ?)"
    " AND NOT EXISTS (SELECT 1 FROM checkpoint c WHERE c.path = p.checkpoint"
    " AND (p.content IS NULL OR c.content = p.content)))))"
)
_PROCESSOR = "EXISTS (SELECT 1 FROM processor r WHERE r.id = l.id AND r.ended_at <= ?)"
_LOSSES = (
    # A replay may name them as long as their session has runs.
    f"l.mesh = '{NO_MESH}' AND EXISTS (SELECT 1 FROM session s WHERE s.id = SUBSTR(l.id, 1, LENGTH(l.id) - 5)"
    " AND s.heartbeat_at <= ? AND NOT EXISTS (SELECT 1 FROM adapter a WHERE a.session = s.id))"
)
_KINDS: Mapping[str, str] = MappingProxyType(
    {"run": _RUN, "sampler": _SAMPLER, "processor": _PROCESSOR, "losses": _LOSSES}
)
_ENDED = (
    "NOT EXISTS (SELECT 1 FROM operation o WHERE o.lane = l.id AND (o.finished_at IS NULL OR NOT o.expired"
    " OR o.held_by IS NOT NULL OR o.finished_at > ?))"
)
_KIND = " ".join(f"WHEN {condition} THEN '{kind}'" for kind, condition in _KINDS.items())


class GoneLanes:
    """Forgets what has lanes: runs that were unloaded, data sets that have ended, places that nobody samples from."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._looked_up_to = ""

    def forget(self, *, older_than_s: float) -> int:
        """Delete what ended so long ago; how many. Looks at a thousand lanes, and the next call at those behind them.

        Usage is added up and the audit log written before rows go; files are given up with the last that names them.
        """
        before = self._clock.now() - older_than_s
        rows = self._database.read(
            "SELECT id, ordered, head_kind, head_seq, unload_seq, mesh FROM lane WHERE id > ? ORDER BY id LIMIT ?",
            (self._looked_up_to, _LANES_A_LOOK),
        )
        self._looked_up_to = rows[-1].id if len(rows) == _LANES_A_LOOK else ""
        num_gone = 0
        for row in rows:
            kind = self._kind_of(row.id, before) if _may_have_ended(row) else None
            num_gone += kind is not None and self._forget(row.id, kind, before)
        return num_gone

    def _kind_of(self, lane: str, before: float) -> str | None:
        """What a lane is that has ended by then."""
        rows = self._database.read(
            f"SELECT CASE WHEN {_ENDED} THEN CASE {_KIND} END END AS kind FROM lane l WHERE l.id = ?",
            (*[before] * (_ENDED + _KIND).count("?"), lane),
        )
        return rows[0].kind if rows else None

    def _forget(self, lane: str, kind: str, before: float) -> bool:
        while (num_left := self._forget_operations(lane, kind, before)) == _OPERATIONS_A_STEP:
            pass
        return num_left >= 0

    def _forget_operations(self, lane: str, kind: str, before: float) -> int:
        """Forget some operations of a lane, and with the last of them the lane; how many, -1 if it has come to life."""
        condition = f"{_ENDED} AND {_KINDS[kind]}"
        with self._database.transaction() as transaction:
            locked = lock_lanes(transaction, [lane]).get(lane)
            found = transaction.execute(
                f"SELECT l.id FROM lane l WHERE {condition} AND l.id = ?",
                (*[before] * condition.count("?"), lane),
            ).fetchone()
            if locked is None or found is None:
                return -1
            rows = transaction.execute(
                f"SELECT {FORGOTTEN_COLUMNS} FROM operation WHERE lane = ? ORDER BY seq LIMIT ?",
                (lane, _OPERATIONS_A_STEP),
            ).fetchall()
            _note(transaction, rows)
            delete_operations(transaction, rows, now=self._clock.now())
            if len(rows) < _OPERATIONS_A_STEP:
                session = _DELETE[kind](transaction, lane, self._clock.now())
                for table in ("forgotten", "past_steps"):
                    transaction.execute(f"DELETE FROM {table} WHERE lane = ?", (lane,))
                transaction.execute(
                    "INSERT INTO gone_lane (id, tenant, session) VALUES (?, ?, ?)", (lane, locked.tenant, session)
                )
                transaction.execute("DELETE FROM lane WHERE id = ?", (lane,))
        return len(rows)


def _may_have_ended(lane: Row) -> bool:
    if not lane.ordered or lane.mesh == PROCESSORS_MESH:
        return lane.head_kind is None
    return lane.unload_seq is not None and lane.head_seq > lane.unload_seq


def _note(transaction: Transaction, rows: list[Row]) -> None:
    well = [row for row in rows if row.state == OperationState.DONE]
    note_usage(transaction, well)
    keep(transaction, [row for row in well if OperationKind(row.kind) in TOLD_BY_OPERATIONS])


def _delete_run(transaction: Transaction, run: str, now: float) -> str:
    rows = transaction.execute("DELETE FROM snapshot WHERE adapter = ? RETURNING blob", (run,)).fetchall()
    blobs = sorted({row.blob for row in rows})
    shared = transaction.execute(f"SELECT blob FROM snapshot WHERE blob IN ({placeholders(blobs)})", blobs).fetchall()
    doom(transaction, sorted({*blobs} - {row.blob for row in shared}), now=now)
    for table in ("branch", "named_adapter"):
        transaction.execute(f"DELETE FROM {table} WHERE adapter = ?", (run,))
    transaction.execute("DELETE FROM push WHERE run = ?", (run,))
    return _session_of(transaction.execute("DELETE FROM adapter WHERE id = ? RETURNING session", (run,)).fetchone())


def _delete_sampler(transaction: Transaction, sampler: str, now: float) -> str:
    # What nameless weights came to is still told.
    transaction.execute(
        "INSERT INTO past_checkpoint (path, tenant, adapter, session, base_model, size_bytes, created_at, ended_at)"
        " SELECT '', e.tenant, e.adapter, e.session, p.base_model, e.size_bytes, e.opened_at, e.ended_at"
        " FROM ephemeral_weights e JOIN sampling_session p ON p.id = e.sampling_session WHERE e.sampling_session = ?",
        (sampler,),
    )
    transaction.execute("DELETE FROM ephemeral_weights WHERE sampling_session = ?", (sampler,))
    return _session_of(
        transaction.execute("DELETE FROM sampling_session WHERE id = ? RETURNING session", (sampler,)).fetchone()
    )


def _delete_processor(transaction: Transaction, processor: str, now: float) -> str:
    return _session_of(
        transaction.execute("DELETE FROM processor WHERE id = ? RETURNING session", (processor,)).fetchone()
    )


def _delete_losses(transaction: Transaction, lane: str, now: float) -> str:
    return lane.rpartition(":")[0]


def _session_of(row: Row | None) -> str:
    assert row is not None, "the lane is locked, and was just looked at"
    return str(row.session)


_Delete: TypeAlias = Callable[[Transaction, str, float], str]
_DELETE: Mapping[str, _Delete] = MappingProxyType(
    {"run": _delete_run, "sampler": _delete_sampler, "processor": _delete_processor, "losses": _delete_losses}
)
"""Take away what a lane is, and give up its files; the id of its client's session."""
