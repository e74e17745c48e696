"""Counts for people: what each mesh has and what waits for it."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes


@dataclass(frozen=True, kw_only=True)
class MeshCensus:
    """One mesh at a glance. ``oldest_waits_s`` is the age of its oldest unfinished operation.

    ``num_parked`` of its adapters lie in the object store only: their clients have gone.
    """

    name: str
    alive: bool
    base_model: str | None
    device: str | None
    num_adapters: int
    num_parked: int
    num_queued: int
    num_running: int
    oldest_waits_s: float | None


def census(database: Database, clock: Clock) -> list[MeshCensus]:
    """Every mesh that ever had a worker. Reads the unfinished operations only."""
    rows = database.read(
        "SELECT mesh, SUM(CASE WHEN state = 'queued' THEN 1 ELSE 0 END),"
        " SUM(CASE WHEN state = 'running' THEN 1 ELSE 0 END), MIN(accepted_at)"
        " FROM operation WHERE state IN ('queued', 'running') GROUP BY mesh"
    )
    waiting = {row[0]: (int(row[1]), int(row[2]), float(row[3])) for row in rows}
    rows = database.read("SELECT mesh, COUNT(*) FROM adapter WHERE parked_at IS NOT NULL GROUP BY mesh")
    parked = {row[0]: int(row[1]) for row in rows}
    now = clock.now()
    found = []
    for mesh in Meshes(database, clock).all():
        num_queued, num_running, oldest = waiting.get(mesh.name, (0, 0, None))
        found.append(
            MeshCensus(
                name=mesh.name,
                alive=mesh.alive,
                base_model=None if mesh.capabilities is None else mesh.capabilities.base_model,
                device=None if mesh.capabilities is None else mesh.capabilities.device,
                num_adapters=mesh.num_adapters,
                num_parked=parked.get(mesh.name, 0),
                num_queued=num_queued,
                num_running=num_running,
                oldest_waits_s=None if oldest is None else max(0.0, now - oldest),
            )
        )
    return found
