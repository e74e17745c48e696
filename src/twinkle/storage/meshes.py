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


class Meshes:
    """Who holds which mesh, and what it can do."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def acquire(self, mesh: str, owner: ProcessIdentity, *, lease_s: float) -> Lease | None:
        """Take the mesh under a new epoch, or ``None`` while somebody else's lease runs.

        A holder that is known dead (it lived on this machine and the kernel no longer knows it) is not waited for.
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
            if row[0] is not None and row[2] > now and row[0] != str(owner):
                holder = ProcessIdentity.parse(row[0])
                if holder is None or not holder.is_known_dead():
                    return None
            lease = Lease(mesh=mesh, owner=str(owner), epoch=row[1] + 1, expires_at=now + lease_s)
            transaction.execute(
                "UPDATE mesh SET owner = ?, epoch = ?, expires_at = ? WHERE name = ?",
                (lease.owner, lease.epoch, lease.expires_at, mesh),
            )
        return lease

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
