"""Meshes and their leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinkle.core.clock import Clock
from twinkle.core.errors import LeaseLost
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.mesh import MeshAnnouncement, MeshCapabilities
from twinkle.storage.database import Database

DEFAULT_SILENT_S = 300.0
ANNOUNCED_S = 120.0
"""How long an announcement holds that nobody renews: whoever made it has been killed."""
_RECENT_S = 60.0
_MAX_RECENT = 2000

_MESHES = (
    "SELECT m.name, m.capabilities, m.epoch, m.owner, m.expires_at, m.draining_at, m.drains_to, m.asked_for, m.trouble,"
    " m.announced,"
    " (SELECT COUNT(*) FROM lane l WHERE l.mesh = m.name AND l.moving_to IS NOT NULL) AS num_moving,"
    " (SELECT COUNT(*) FROM adapter a WHERE a.mesh = m.name) AS num_adapters,"
    " (SELECT COUNT(*) FROM adapter a WHERE a.mesh = m.name AND a.parked_at IS NOT NULL) AS num_parked,"
    " (SELECT COUNT(*) FROM adapter a JOIN session s ON s.id = a.session WHERE a.mesh = m.name"
    " AND a.parked_at IS NULL AND s.finished_at IS NULL AND s.heartbeat_at >= ?) AS num_live"
    " FROM mesh m ORDER BY m.name"
)
_RECENT_TOKENS = (
    "SELECT r.mesh, SUM(r.num_tokens) AS num_tokens, "
    " COUNT(DISTINCT CASE WHEN r.num_tokens > 0 THEN r.lane END) AS num_lanes"
    " FROM (SELECT mesh, lane, num_tokens FROM operation"
    " WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL AND finished_at >= ?"
    " ORDER BY finished_at DESC LIMIT ?) AS r"
    " GROUP BY r.mesh"
)


@dataclass(frozen=True, kw_only=True)
class MeshStatus:
    """A mesh as everyone may see it. ``alive`` means: its holder has renewed the lease in time.

    ``num_parked`` of its adapters lie in the object store only: their clients have gone. ``num_live`` are in sessions
    that live, and ``recent_tokens`` is what was served in the last minute, or by the last operations in it, to
    ``num_served`` adapters and sampling sessions.
    """

    name: str
    capabilities: MeshCapabilities | None
    epoch: int
    alive: bool
    num_adapters: int
    num_parked: int = 0
    num_live: int = 0
    recent_tokens: int = 0
    num_served: int = 0
    is_draining: bool = False
    drains_to: str | None = None
    num_moving: int = 0
    asked_for: str | None = None
    trouble: str | None = None
    """Why its last worker did not start, in words for the operator."""
    announced: MeshAnnouncement | None = None
    """What it will serve: its worker starts, lives, and has not said anything yet."""


@dataclass(frozen=True, kw_only=True)
class MeshCensus:
    """One mesh for people. ``oldest_waits_s`` is the age of its oldest unfinished operation."""

    name: str
    alive: bool
    base_model: str | None
    device: str | None
    num_adapters: int
    num_parked: int
    num_live: int
    num_queued: int
    num_running: int
    oldest_waits_s: float | None
    is_draining: bool = False
    num_moving: int = 0
    trouble: str | None = None
    asked_for: str | None = None
    num_busy: int = 0
    """Runs and sampling sessions with unfinished operations."""
    memory_bytes: int = 0
    memory_held: dict[str, int] = field(default_factory=dict)
    """Of its first device, in all and by who holds it, by its worker's last word; nothing where it does not count."""


class _Announced(MeshAnnouncement, frozen=True):
    """An announcement as it is stored."""

    until: float = 0.0

    @classmethod
    def text_of(cls, announcement: MeshAnnouncement, *, until: float) -> str:
        return cls(base_model=announcement.base_model, serves=announcement.serves, until=until).model_dump_json()

    @classmethod
    def holding(cls, text: str | None, *, now: float) -> MeshAnnouncement | None:
        """What is announced still."""
        stored = None if text is None else cls.model_validate_json(text)
        if stored is None or stored.until <= now:
            return None
        return MeshAnnouncement(base_model=stored.base_model, serves=stored.serves)


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
            is_anothers = row.owner is not None and row.owner != str(owner)
            if is_anothers and self._runs(mesh, row.epoch, row.expires_at, lease_s=lease_s):
                holder = ProcessIdentity.parse(row.owner)
                if holder is None or not holder.is_known_dead():
                    return None
            lease = Lease(mesh=mesh, owner=str(owner), epoch=row.epoch + 1, expires_at=now + lease_s)
            transaction.execute(
                "UPDATE mesh SET owner = ?, epoch = ?, expires_at = ?, trouble = NULL, trouble_at = NULL"
                " WHERE name = ?",
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
                "UPDATE mesh SET capabilities = ?, announced = NULL WHERE name = ? AND epoch = ?",
                (capabilities.model_dump_json(), lease.mesh, lease.epoch),
            )

    def announce(self, mesh: str, announcement: MeshAnnouncement) -> None:
        """Say what the mesh will serve, before its worker can.

        Forgotten when it does, and after :data:`ANNOUNCED_S` unless it is renewed.
        """
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO mesh (name, epoch, expires_at, announced) VALUES (?, 0, 0, ?)"
                " ON CONFLICT (name) DO UPDATE SET announced = excluded.announced",
                (mesh, self._held(announcement)),
            )

    def renew_announcement(self, mesh: str, announcement: MeshAnnouncement) -> bool:
        """Its worker starts still; whether there was anything to renew: none once it has said what it can do."""
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE mesh SET announced = ? WHERE name = ? AND announced IS NOT NULL",
                (self._held(announcement), mesh),
            ).rowcount
        return changed == 1

    def _held(self, announcement: MeshAnnouncement) -> str:
        return _Announced.text_of(announcement, until=self._clock.now() + ANNOUNCED_S)

    def withdraw(self, mesh: str) -> None:
        """Nobody starts a worker of the mesh any more. One of which nothing else was ever known is forgotten."""
        with self._database.transaction() as transaction:
            transaction.execute("UPDATE mesh SET announced = NULL WHERE name = ?", (mesh,))
            transaction.execute(
                "DELETE FROM mesh WHERE name = ? AND epoch = 0 AND capabilities IS NULL AND asked_for IS NULL"
                " AND trouble IS NULL AND draining_at IS NULL",
                (mesh,),
            )

    def all(self, *, silent_s: float = DEFAULT_SILENT_S) -> list[MeshStatus]:
        """Every mesh that ever had a worker, or is to have one.

        Args:
            silent_s: How long a session may say nothing and still live.
        """
        now = self._clock.now()
        rows = self._database.read(_MESHES, (now - silent_s,))
        recent = self._database.read(_RECENT_TOKENS, (now - _RECENT_S, _MAX_RECENT))
        tokens = {row.mesh: int(row.num_tokens) for row in recent}
        num_served = {row.mesh: row.num_lanes for row in recent}
        return [
            MeshStatus(
                name=row.name,
                capabilities=None
                if row.capabilities is None
                else MeshCapabilities.model_validate_json(row.capabilities),
                epoch=row.epoch,
                alive=row.owner is not None and row.expires_at > now,
                num_adapters=row.num_adapters,
                num_parked=row.num_parked,
                num_live=row.num_live,
                recent_tokens=tokens.get(row.name, 0),
                num_served=num_served.get(row.name, 0),
                is_draining=row.draining_at is not None,
                drains_to=row.drains_to,
                num_moving=row.num_moving,
                asked_for=row.asked_for,
                trouble=row.trouble,
                announced=_Announced.holding(row.announced, now=now),
            )
            for row in rows
        ]

    def census(self) -> list[MeshCensus]:
        """Every mesh, and what waits for it. Reads the unfinished operations only."""
        rows = self._database.read(
            "SELECT mesh, SUM(CASE WHEN state = 'queued' THEN 1 ELSE 0 END) AS num_queued,"
            " SUM(CASE WHEN state = 'running' THEN 1 ELSE 0 END) AS num_running, MIN(accepted_at) AS oldest,"
            " COUNT(DISTINCT lane) AS num_busy"
            " FROM operation WHERE state IN ('queued', 'running') GROUP BY mesh"
        )
        waiting = {row.mesh: row for row in rows}
        now = self._clock.now()
        found = []
        for mesh in self.all():
            queue = waiting.get(mesh.name)
            found.append(
                MeshCensus(
                    name=mesh.name,
                    alive=mesh.alive,
                    base_model=None if mesh.capabilities is None else mesh.capabilities.base_model,
                    device=None if mesh.capabilities is None else mesh.capabilities.device,
                    num_adapters=mesh.num_adapters,
                    num_parked=mesh.num_parked,
                    num_live=mesh.num_live,
                    num_queued=0 if queue is None else int(queue.num_queued),
                    num_running=0 if queue is None else int(queue.num_running),
                    oldest_waits_s=None if queue is None else max(0.0, now - queue.oldest),
                    is_draining=mesh.is_draining,
                    num_moving=mesh.num_moving,
                    trouble=mesh.trouble,
                    asked_for=mesh.asked_for,
                    num_busy=0 if queue is None else int(queue.num_busy),
                    memory_bytes=0 if mesh.capabilities is None else mesh.capabilities.memory_bytes,
                    memory_held={} if mesh.capabilities is None else mesh.capabilities.memory_held,
                )
            )
        return found

    def note_trouble(self, mesh: str, reason: str) -> None:
        """Say why a worker of the mesh did not start; forgotten when one takes the mesh."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO mesh (name, epoch, expires_at, trouble, trouble_at) VALUES (?, 0, 0, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET trouble = excluded.trouble, trouble_at = excluded.trouble_at",
                (mesh, reason, self._clock.now()),
            )
