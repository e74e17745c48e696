"""How fast a mesh was lately: what the device took for single operations, for whoever reckons what work will take."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database

MAX_MEASURED = 1000
"""So many of the last operations are looked at, of all meshes together."""

_RECENT = (
    "SELECT r.kind, r.num_tokens, r.device_s, r.started_at, r.finished_at FROM (SELECT mesh, kind, state, num_tokens,"
    " device_s, started_at, finished_at FROM operation WHERE finished_at IS NOT NULL AND NOT expired"
    " ORDER BY finished_at DESC LIMIT ?) AS r WHERE r.mesh = ? AND r.state = 'done' AND r.started_at IS NOT NULL"
)
_BUSY_TENANTS = (
    "SELECT COUNT(DISTINCT tenant) AS num FROM lane WHERE mesh = ? AND head_kind IS NOT NULL AND tenant <> ?"
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One operation that ended well: its part of the device's time, and all the time since its start."""

    kind: OperationKind
    num_tokens: int
    device_s: float
    elapsed_s: float


class Speeds:
    """Reads what was measured; changes nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def recent(self, mesh: str) -> list[Measured]:
        """The last operations of a mesh that ended well; none where nothing has run lately."""
        return [
            Measured(
                kind=OperationKind(row.kind),
                num_tokens=row.num_tokens,
                device_s=row.device_s,
                elapsed_s=row.finished_at - row.started_at,
            )
            for row in self._database.read(_RECENT, (MAX_MEASURED, mesh))
        ]

    def num_others(self, mesh: str, tenant: str) -> int:
        """How many other tenants have work waiting or running on the mesh now, with whom its time is shared."""
        return int(self._database.read(_BUSY_TENANTS, (mesh, tenant))[0].num)
