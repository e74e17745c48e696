"""The audit log: who made, revoked, published, deleted, suspended what, and when.

It only grows: triggers of the database refuse to change an entry, and to delete one that is not older than what is
kept (:meth:`Audit.forget_before`). What a tenant saved and loaded stands in the journal's operations until those go;
whatever else belongs here is written together with what it tells of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from twinkle.core.actor import TENANT, actor_now
from twinkle.core.adapter import CheckpointKind
from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database, Row, Transaction, placeholders

_KIND_OF_SAVE = {
    OperationKind.SAVE_WEIGHTS: CheckpointKind.TRAINING,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: CheckpointKind.SAMPLER,
    OperationKind.SAVE_WEIGHTS_EXTERNAL: CheckpointKind.EXTERNAL,
}
TOLD_BY_OPERATIONS = (*_KIND_OF_SAVE, OperationKind.LOAD_WEIGHTS)
"""Kinds of operations that belong in the audit log."""

_BATCH = 1000
_MAX_BATCHES = 200
_NOTED = (
    "SELECT a.id, a.at, a.actor, a.event, a.details, t.name AS tenant_name FROM audit a"
    " LEFT JOIN tenant t ON t.id = a.tenant WHERE a.at >= ? AND a.at < ?"
)
_SAVED_AND_LOADED = (
    "SELECT o.finished_at, o.kind, o.lane, o.payload, t.name AS tenant_name FROM operation o"
    f" JOIN tenant t ON t.id = o.tenant WHERE o.state = 'done' AND o.kind IN ({placeholders(TOLD_BY_OPERATIONS)})"
    " AND o.finished_at >= ? AND o.finished_at < ? AND o.finished_at >= (SELECT at FROM audit_floor)"
)


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """One entry. ``tenant`` is the name of whose it is; ``None``: the service's, as with meshes."""

    at: float
    tenant: str | None
    actor: str
    event: str
    details: dict[str, str]


class Audit:
    """What was done, of one tenant or of all."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def note(self, tenant: str | None, event: str, **details: str) -> None:
        """Write an entry. ``event`` is ``<resource>_<action>``; details are ids and paths, never data nor keys."""
        with self._database.transaction() as transaction:
            insert_entry(transaction, tenant, event, details, now=self._clock.now())

    def entries(
        self, tenant: str | None = None, *, start: float, end: float, limit: int | None = None
    ) -> list[AuditRecord]:
        """What was done from ``start`` until before ``end``, the oldest first.

        Args:
            tenant: Whose, by its id; of all, where it is none.
            start: In seconds since the epoch, as ``end``.
            end: Not included.
            limit: How many of the latest; all, where it is none.
        """
        latest = "" if limit is None else f" LIMIT {int(limit)}"
        # The operations first: one that goes meanwhile is told twice rather than not at all.
        told = self._database.read(
            f"{_SAVED_AND_LOADED}{_of(tenant, 'o')} ORDER BY o.finished_at DESC{latest}",
            (*TOLD_BY_OPERATIONS, start, end, *_given(tenant)),
        )
        noted = self._database.read(
            f"{_NOTED}{_of(tenant, 'a')} ORDER BY a.at DESC, a.id DESC{latest}", (start, end, *_given(tenant))
        )
        found = [_record_of(row) for row in reversed(noted)]
        found += [_told_by(row, tenant=row.tenant_name) for row in reversed(told)]
        found.sort(key=lambda entry: entry.at)
        return found if limit is None else found[-limit:]

    def forget(self, *, older_than_s: float) -> int:
        """Delete what is older than that; how many."""
        return self.forget_before(self._clock.now() - older_than_s)

    def forget_before(self, moment: float) -> int:
        """Delete what is older, some at a time; how many. Nothing else ever leaves the log, nor does this go back."""
        with self._database.transaction() as transaction:
            transaction.execute("UPDATE audit_floor SET at = ? WHERE at < ?", (moment, moment))
        num_gone = 0
        for _ in range(_MAX_BATCHES):
            with self._database.transaction() as transaction:
                num = transaction.execute(
                    "DELETE FROM audit WHERE id IN (SELECT id FROM audit WHERE at < ? ORDER BY at LIMIT ?)",
                    (moment, _BATCH),
                ).rowcount
            num_gone += num
            if num < _BATCH:
                break
        return num_gone


def insert_entry(
    transaction: Transaction, tenant: str | None, event: str, details: Mapping[str, str], *, now: float
) -> None:
    """Write an entry, of who acts now, together with what it tells of."""
    _insert(transaction, tenant, actor_now(), event, details, at=now)


def keep(transaction: Transaction, operations: Iterable[Row]) -> None:
    """Write down what operations tell that are about to go, unless the log has forgotten that time.

    Args:
        transaction: That in which they go.
        operations: Ended well, and of the kinds ``TOLD_BY_OPERATIONS``; with ``tenant``, ``finished_at``, ``kind``,
            ``lane`` and ``payload``.
    """
    floor = transaction.execute("SELECT at FROM audit_floor").fetchone()
    assert floor is not None, "it has a row from the beginning"
    for row in operations:
        if row.finished_at < floor.at:
            continue
        entry = _told_by(row, tenant=None)
        _insert(transaction, row.tenant, entry.actor, entry.event, entry.details, at=entry.at)


def _insert(
    transaction: Transaction, tenant: str | None, actor: str, event: str, details: Mapping[str, str], *, at: float
) -> None:
    transaction.execute(
        "INSERT INTO audit (tenant, at, actor, event, details) VALUES (?, ?, ?, ?, ?)",
        (tenant, at, actor, event, json.dumps(dict(details))),
    )


def _of(tenant: str | None, table: str) -> str:
    return "" if tenant is None else f" AND {table}.tenant = ?"


def _given(tenant: str | None) -> tuple[str, ...]:
    return () if tenant is None else (tenant,)


def _record_of(row: Row) -> AuditRecord:
    return AuditRecord(
        at=row.at, tenant=row.tenant_name, actor=row.actor, event=row.event, details=json.loads(row.details)
    )


def _told_by(row: Row, *, tenant: str | None) -> AuditRecord:
    """A save or a load. A sampler's weights without a name have no path."""
    request = json.loads(row.payload or b"{}")
    name, kind = request.get("path"), OperationKind(row.kind)
    if kind is OperationKind.LOAD_WEIGHTS:
        event, details = "checkpoint_read", {"tinker_path": name, "training_run": row.lane, "purpose": "load"}
        if "grant" in request:
            details["token_id"] = request["grant"]["token"]
    else:
        path = {} if name is None else {"tinker_path": f"tinker://{row.lane}/{_KIND_OF_SAVE[kind].segment}/{name}"}
        event, details = "checkpoint_create", {**path, "training_run": row.lane}
    return AuditRecord(at=row.finished_at, tenant=tenant, actor=TENANT, event=event, details=details)
