"""Meshes and their leases."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import LeaseLost
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.storage.database import Database


@dataclass(frozen=True, kw_only=True)
class MeshStatus:
    """A mesh as everyone may see it. ``alive`` means: its holder has renewed the lease in time."""

    name: str
    capabilities: MeshCapabilities | None
    epoch: int
    alive: bool
    num_adapters: int


@dataclass(frozen=True, kw_only=True)
class _Sighting:
    """A lease as somebody else's process has seen it, at times of its own that nobody sets."""

    epoch: int
    expires_at: float
    since_s: float
    renewed_s: float | None = None


class Meshes:
    """Who holds which mesh, and what it can do."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._sightings: dict[str, _Sighting] = {}

    def acquire(self, mesh: str, owner: ProcessIdentity, *, lease_s: float) -> Lease | None:
        """Take the mesh under a new epoch, or ``None`` while somebody else's lease runs.

        A holder that is known dead (it lived on this machine and the kernel no longer knows it) is not waited for.
        Whether a lease has run out is for the wall clock to say, which all processes share, until this one has watched
        it for a while: then what it saw decides, so that a clock that is set neither ends a lease nor prolongs it.
        """
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO mesh (name, epoch, expires_at) VALUES (?, 0, 0) ON CONFLICT (name) DO NOTHING", (mesh,)
            )
            row = transaction.execute(
                "SELECT owner, epoch, expires_at FROM mesh WHERE name = ? FOR UPDATE", (mesh,)
            ).fetchone()
            assert row is not None
            now = self._clock.now()
            if row[0] is not None and row[0] != str(owner) and self._runs(mesh, row[1], row[2], lease_s=lease_s):
                holder = ProcessIdentity.parse(row[0])
                if holder is None or not holder.is_known_dead():
                    return None
            lease = Lease(mesh=mesh, owner=str(owner), epoch=row[1] + 1, expires_at=now + lease_s)
            transaction.execute(
                "UPDATE mesh SET owner = ?, epoch = ?, expires_at = ? WHERE name = ?",
                (lease.owner, lease.epoch, lease.expires_at, mesh),
            )
        return lease

    def _runs(self, mesh: str, epoch: int, expires_at: float, *, lease_s: float) -> bool:
        """Whether another's lease still runs."""
        now_s = self._clock.monotonic()
        seen = self._sightings.get(mesh)
        if seen is None or seen.epoch != epoch:
            seen = _Sighting(epoch=epoch, expires_at=expires_at, since_s=now_s)
        elif seen.expires_at != expires_at:
            seen = _Sighting(epoch=epoch, expires_at=expires_at, since_s=now_s, renewed_s=now_s)
        self._sightings[mesh] = seen
        if seen.renewed_s is not None:
            return now_s - seen.renewed_s < lease_s
        return expires_at > self._clock.now() and now_s - seen.since_s < lease_s

    def renew(self, lease: Lease, *, lease_s: float) -> None:
        """Extend the lease.

        Raises:
            LeaseLost: Another epoch holds the mesh.
        """
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE mesh SET expires_at = ? WHERE name = ? AND epoch = ? AND owner = ?",
                (self._clock.now() + lease_s, lease.mesh, lease.epoch, lease.owner),
            ).rowcount
        if changed != 1:
            raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended", mesh=lease.mesh)

    def release(self, lease: Lease) -> None:
        """Give the mesh up; nothing happens if it is somebody else's already."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE mesh SET owner = NULL, expires_at = 0 WHERE name = ? AND epoch = ? AND owner = ?",
                (lease.mesh, lease.epoch, lease.owner),
            )

    def publish(self, lease: Lease, capabilities: MeshCapabilities) -> None:
        """Say what the mesh can do. Readers see it from now on, also while no worker lives."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE mesh SET capabilities = ? WHERE name = ? AND epoch = ?",
                (capabilities.model_dump_json(), lease.mesh, lease.epoch),
            )

    def all(self) -> list[MeshStatus]:
        """Every mesh that ever had a worker."""
        rows = self._database.read(
            "SELECT name, capabilities, epoch, owner, expires_at,"
            " (SELECT COUNT(*) FROM adapter WHERE adapter.mesh = mesh.name) FROM mesh ORDER BY name"
        )
        now = self._clock.now()
        return [
            MeshStatus(
                name=row[0],
                capabilities=None if row[1] is None else MeshCapabilities.model_validate_json(row[1]),
                epoch=row[2],
                alive=row[3] is not None and row[4] > now,
                num_adapters=row[5],
            )
            for row in rows
        ]
