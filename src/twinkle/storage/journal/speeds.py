"""How fast a mesh was lately: what the device took for single operations, for whoever reckons what work will take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database

MAX_MEASURED = 1000
"""So many of the last operations are looked at, of all meshes together."""

_RECENT = (
    "SELECT r.kind, r.num_tokens, r.num_prompt_tokens, r.device_s, r.started_at, r.finished_at FROM (SELECT mesh, kind,"
    " state, num_tokens, num_prompt_tokens, device_s, started_at, finished_at FROM operation"
    " WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"
    " ORDER BY finished_at DESC LIMIT ?) AS r WHERE r.mesh = ? AND r.state = 'done' AND r.started_at IS NOT NULL"
)
_BUSY_TENANTS = (
    "SELECT COUNT(DISTINCT tenant) AS num FROM lane WHERE mesh = ? AND head_kind IS NOT NULL AND tenant <> ?"
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One operation that ended well: its part of the device's time, and from when to when it was at work.

    ``num_tokens`` are all of them, of a sample those of its prompt too. Samples are drawn many at a time, and the
    ``device_s`` of each is all the time that it took: only from when to when tells what they took together.
    """

    kind: OperationKind
    num_tokens: int
    device_s: float
    started_at: float
    finished_at: float


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known of the meshes that serve a model: how large adapters are, how fast it was, who shares it now."""

    sizes: AdapterSizes | None
    measured: Sequence[Measured]
    num_others: int


class Speeds:
    """Reads what was measured; changes nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of_model(self, base_model: str, tenant: str) -> ModelFacts:
        """What is known of a model by what its meshes have said and done; nothing where none serves it."""
        rows = self._database.read("SELECT name, capabilities FROM mesh WHERE capabilities IS NOT NULL ORDER BY name")
        meshes = {row.name: MeshCapabilities.model_validate_json(row.capabilities) for row in rows}
        own = {name: mesh for name, mesh in meshes.items() if mesh.base_model == base_model}
        return ModelFacts(
            sizes=next((mesh.adapter_sizes for mesh in own.values() if mesh.adapter_sizes is not None), None),
            measured=[one for name in own for one in self.recent(name)],
            num_others=min((self.num_others(name, tenant) for name in own), default=0),
        )

    def recent(self, mesh: str) -> list[Measured]:
        """The last operations of a mesh that ended well; none where nothing has run lately."""
        return [
            Measured(
                kind=OperationKind(row.kind),
                num_tokens=row.num_tokens + row.num_prompt_tokens,
                device_s=row.device_s,
                started_at=row.started_at,
                finished_at=row.finished_at,
            )
            for row in self._database.read(_RECENT, (MAX_MEASURED, mesh))
        ]

    def num_others(self, mesh: str, tenant: str) -> int:
        """How many other tenants have work waiting or running on the mesh now, with whom its time is shared."""
        return int(self._database.read(_BUSY_TENANTS, (mesh, tenant))[0].num)
