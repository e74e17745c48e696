"""Who did what to which checkpoint or key. Saves and loads are told by the journal, the rest is noted as it happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from twinkle.core.adapter import CheckpointKind
from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database, Transaction

_KIND_OF_SAVE = {
    OperationKind.SAVE_WEIGHTS: CheckpointKind.TRAINING,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: CheckpointKind.SAMPLER,
    OperationKind.SAVE_WEIGHTS_EXTERNAL: CheckpointKind.EXTERNAL,
}
_KINDS = (*_KIND_OF_SAVE, OperationKind.LOAD_WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """One entry."""

    at: float
    event: str
    details: dict[str, str]


class Audit:
    """The audit log."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def note(self, tenant: str, event: str, **details: str) -> None:
        """Write an entry. ``event`` is ``<resource>_<action>``; details are ids and paths, never data nor keys."""
        with self._database.transaction() as transaction:
            insert_entry(transaction, tenant, event, details, now=self._clock.now())

    def entries(self, tenant: str, *, start: float, end: float) -> list[AuditRecord]:
        """What a tenant did from ``start`` until before ``end``, the oldest first."""
        noted = self._database.read(
            "SELECT at, event, details FROM audit WHERE tenant = ? AND at >= ? AND at < ?", (tenant, start, end)
        )
        entries = [AuditRecord(at=row.at, event=row.event, details=json.loads(row.details)) for row in noted]
        marks = ", ".join("?" * len(_KINDS))
        operations = self._database.read(
            "SELECT finished_at, kind, lane, payload FROM operation WHERE tenant = ? AND state = 'done'"
            f" AND finished_at >= ? AND finished_at < ? AND kind IN ({marks})",
            (tenant, start, end, *_KINDS),
        )
        entries += [_entry_of(row.finished_at, OperationKind(row.kind), row.lane, row.payload) for row in operations]
        return sorted(entries, key=lambda entry: entry.at)


def insert_entry(transaction: Transaction, tenant: str, event: str, details: Mapping[str, str], *, now: float) -> None:
    """Write an entry together with what it tells of."""
    transaction.execute(
        "INSERT INTO audit (tenant, at, event, details) VALUES (?, ?, ?, ?)",
        (tenant, now, event, json.dumps(dict(details))),
    )


def _entry_of(at: float, kind: OperationKind, lane: str, payload: bytes | None) -> AuditRecord:
    """A save or a load. A sampler's weights without a name have no path."""
    request = json.loads(payload or b"{}")
    name = request.get("path")
    if kind is OperationKind.LOAD_WEIGHTS:
        details = {"tinker_path": name, "training_run": lane, "purpose": "load"}
        if "grant" in request:
            details["token_id"] = request["grant"]["token"]
        return AuditRecord(at=at, event="checkpoint_read", details=details)
    path = {} if name is None else {"tinker_path": f"tinker://{lane}/{_KIND_OF_SAVE[kind].segment}/{name}"}
    return AuditRecord(at=at, event="checkpoint_create", details={**path, "training_run": lane})
