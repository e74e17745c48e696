"""Adapters and sampling sessions on their way from one mesh to another of the same model.

A lane that moves is offered to nobody. Its mesh's worker stores the adapter and lets the lane go; where no worker
lives, housekeeping does, and the next mesh replays. What a worker still has in its hands of a lane that went without it
is not taken any more: every claim and every outcome names the mesh that the operation is at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.process.crash import crash_point
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.lanes import NO_MESH, LockedLane, lock_lanes

GIVEN_BACK = ""
"""What is asked for where a mesh is to have no worker any more."""

_MAX_AT_ONCE = 500

_LEAVING = (
    "SELECT l.id, l.ordered, CASE WHEN l.ordered AND (l.unload_seq IS NULL OR l.head_seq <= l.unload_seq)"
    " THEN l.head_seq - 1 ELSE -1 END AS last_seq FROM lane l"
    " WHERE l.mesh = ? AND l.moving_to IS NOT NULL AND l.id NOT IN ({others})"
    " AND NOT EXISTS (SELECT 1 FROM operation o WHERE l.ordered AND o.lane = l.id AND o.seq = l.head_seq"
    " AND o.state = 'running')"
    " AND NOT EXISTS (SELECT 1 FROM operation o WHERE o.mesh = l.mesh AND o.lane = l.id AND o.kind = 'sample'"
    " AND o.state IN ('queued', 'running') AND o.state = 'running')"
    " ORDER BY l.head_kind IS NULL, l.id LIMIT ?"
)
_ABANDONED = (
    "SELECT l.id, l.mesh FROM lane l JOIN mesh m ON m.name = l.mesh WHERE l.moving_to IS NOT NULL"
    " AND (m.owner IS NULL OR m.expires_at <= ?) ORDER BY l.id LIMIT ?"
)


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A lane that its mesh is to let go; ``last_seq`` is what has to be stored of its adapter, -1 for nothing."""

    lane: str
    last_seq: int


class Moves:
    """Lanes on their way. Each method is one short transaction, and doing it again changes nothing."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    # -- asked for ----------------------------------------------------------------------------------------------------

    def begin(self, lane: str, to_mesh: str) -> bool:
        """Send an adapter or a sampling session to another mesh; false when it is there already.

        Raises:
            NotFound: There is no such lane, or no such mesh.
            InvalidInput: That mesh serves another model, or no model yet.
            Conflict: That mesh is being drained.
        """
        with self._database.transaction() as transaction:
            locked = lock_lanes(transaction, [lane]).get(lane)
            if locked is None or locked.mesh == NO_MESH:
                raise NotFound(f"no adapter or sampling session {lane!r}")
            if locked.mesh == to_mesh:
                transaction.execute("UPDATE lane SET moving_to = NULL WHERE id = ?", (lane,))
                return False
            _require_fit(transaction, locked.mesh, to_mesh)
            _send(transaction, [lane], to_mesh)
        return True

    def ask_for(self, mesh: str, text: str) -> None:
        """Note with what a worker of a mesh is to be started, and let the mesh stay if it was being drained."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO mesh (name, epoch, expires_at, asked_for) VALUES (?, 0, 0, ?)"
                " ON CONFLICT (name) DO UPDATE SET asked_for = excluded.asked_for",
                (mesh, text),
            )
        self.restore(mesh)

    def give_back(self, mesh: str) -> None:
        """Ask whoever started the worker of a mesh to stop it once nothing is on it any more."""
        with self._database.transaction() as transaction:
            transaction.execute("UPDATE mesh SET asked_for = ? WHERE name = ?", (GIVEN_BACK, mesh))

    def place_of(self, lane: str) -> str | None:
        """The mesh a lane is on."""
        rows = self._database.read("SELECT mesh FROM lane WHERE id = ?", (lane,))
        return str(rows[0].mesh) if rows else None

    def is_empty(self, mesh: str) -> bool:
        """Whether nothing is on a mesh."""
        return not self._database.read("SELECT 1 AS one FROM lane WHERE mesh = ? LIMIT 1", (mesh,))

    def drain(self, mesh: str, *, to_mesh: str | None = None) -> None:
        """Let nothing new come to a mesh, and have everything that is on it moved. What is on its way to it stays.

        Raises:
            NotFound: There is no such mesh.
            InvalidInput: The one that all is to go to serves another model.
            Conflict: That one is being drained itself.
        """
        with self._database.transaction() as transaction:
            # As in `restore`.
            transaction.execute("UPDATE lane SET moving_to = NULL WHERE moving_to = ?", (mesh,))
            if to_mesh is None:
                _mesh(transaction, mesh)
            else:
                _require_fit(transaction, mesh, to_mesh)
            transaction.execute(
                "UPDATE mesh SET draining_at = COALESCE(draining_at, ?), drains_to = ? WHERE name = ?",
                (self._clock.now(), to_mesh, mesh),
            )

    def restore(self, mesh: str) -> None:
        """Let a mesh that is being drained stay; what has not left yet stays with it.

        Raises:
            NotFound: There is no such mesh.
        """
        with self._database.transaction() as transaction:
            # Lanes before meshes, as everywhere: else two transactions could wait for each other.
            transaction.execute("UPDATE lane SET moving_to = NULL WHERE mesh = ? AND moving_to IS NOT NULL", (mesh,))
            _mesh(transaction, mesh)
            transaction.execute(
                "UPDATE mesh SET draining_at = NULL, drains_to = NULL, asked_for = NULLIF(asked_for, ?) WHERE name = ?",
                (GIVEN_BACK, mesh),
            )

    def remove(self, mesh: str) -> None:
        """Forget a mesh that nothing is on any more.

        Raises:
            NotFound: There is no such mesh.
            Conflict: Something is on it or on its way to it, or a worker holds it.
        """
        with self._database.transaction() as transaction:
            row = _mesh(transaction, mesh)
            if row.owner is not None and row.expires_at > self._clock.now():
                raise Conflict(f"mesh {mesh}: a worker holds it; stop that first")
            left = transaction.execute("SELECT COUNT(*) AS num FROM lane WHERE mesh = ?", (mesh,)).fetchone()
            assert left is not None
            if left.num:
                raise Conflict(
                    f"mesh {mesh}: {left.num} adapters and sampling sessions are on it; `twinkle meshes drain {mesh}`"
                    " moves them to another mesh of their model"
                )
            coming = transaction.execute("SELECT COUNT(*) AS num FROM lane WHERE moving_to = ?", (mesh,)).fetchone()
            assert coming is not None
            if coming.num:
                # Handed over to a mesh that nobody knows, they would wait for ever.
                raise Conflict(
                    f"mesh {mesh}: {coming.num} adapters and sampling sessions are on their way to it; `twinkle meshes"
                    f" drain {mesh}` keeps them where they are"
                )
            source = transaction.execute(
                "SELECT name FROM mesh WHERE drains_to = ? AND draining_at IS NOT NULL LIMIT 1", (mesh,)
            ).fetchone()
            if source is not None:
                raise Conflict(f"mesh {mesh}: mesh {source.name} is drained to it; drain that to another one first")
            transaction.execute("DELETE FROM share WHERE mesh = ?", (mesh,))
            transaction.execute("DELETE FROM mesh WHERE name = ?", (mesh,))

    def staying(self, mesh: str, *, limit: int = _MAX_AT_ONCE) -> list[str]:
        """Lanes of a mesh that have not been sent anywhere, those with work first."""
        rows = self._database.read(
            "SELECT id FROM lane WHERE mesh = ? AND moving_to IS NULL ORDER BY head_kind IS NULL, id LIMIT ?",
            (mesh, limit),
        )
        return [row.id for row in rows]

    def busy(self, mesh: str, *, limit: int = _MAX_AT_ONCE) -> list[str]:
        """Lanes of a mesh that have work and have not been sent anywhere."""
        rows = self._database.read(
            "SELECT DISTINCT l.id FROM operation o JOIN lane l ON l.id = o.lane"
            " WHERE o.state IN ('queued', 'running') AND o.mesh = ? AND l.moving_to IS NULL ORDER BY l.id LIMIT ?",
            (mesh, limit),
        )
        return [row.id for row in rows]

    def send(self, lanes: Sequence[str], to_mesh: str) -> bool:
        """Send lanes of a mesh that is being drained to one that fits; false if that one is gone or drained by now."""
        with self._database.transaction() as transaction:
            locked = lock_lanes(transaction, lanes)
            if not transaction.execute(
                "SELECT name FROM mesh WHERE name = ? AND draining_at IS NULL FOR UPDATE", (to_mesh,)
            ).fetchone():
                return False
            _send(transaction, [lane.id for lane in locked.values() if lane.mesh != to_mesh], to_mesh)
        return True

    # -- let go -------------------------------------------------------------------------------------------------------

    def leaving(self, mesh: str, *, besides: Collection[str], limit: int) -> list[Leaving]:
        """Lanes that a mesh's worker is to let go, none of which has an operation that runs; those with work first."""
        others = ["", *besides]
        rows = self._database.read(_LEAVING.format(others=placeholders(others)), (mesh, *others, limit))
        return [Leaving(lane=row.id, last_seq=row.last_seq) for row in rows]

    def finish(self, lane: str, *, from_mesh: str, by_force: bool = False) -> bool:
        """Hand a lane over with all that waits in it; false while something of it runs there, or it does not move.

        Args:
            lane: Which.
            from_mesh: Where it is.
            by_force: Nobody works there any more: what runs is begun anew. Should somebody work there after all, what
                comes of it is not taken.
        """
        with self._database.transaction() as transaction:
            locked = lock_lanes(transaction, [lane]).get(lane)
            if locked is None or locked.mesh != from_mesh or (to_mesh := _destination(transaction, lane)) is None:
                return False
            condition, parameters = _open_operations(locked)
            waiting = transaction.execute(f"SELECT state FROM operation WHERE {condition} FOR UPDATE", parameters)
            if not by_force and any(row.state == "running" for row in waiting.fetchall()):
                return False
            _hand_over(transaction, locked, to_mesh)
            crash_point("move.handing_over")
        return True

    def finish_abandoned(self, *, limit: int = _MAX_AT_ONCE) -> int:
        """Hand over lanes of meshes that have no worker; how many."""
        rows = self._database.read(_ABANDONED, (self._clock.now(), limit))
        return sum(self.finish(row.id, from_mesh=row.mesh, by_force=True) for row in rows)


def _mesh(transaction: Transaction, name: str) -> Row:
    row = transaction.execute(
        "SELECT name, capabilities, owner, expires_at, draining_at FROM mesh WHERE name = ? FOR UPDATE", (name,)
    ).fetchone()
    if row is None:
        raise NotFound(f"no mesh {name!r}")
    return row


def _require_fit(transaction: Transaction, from_mesh: str, to_mesh: str) -> None:
    # In one order, whichever way something goes: else two transactions could wait for each other.
    rows = {name: _mesh(transaction, name) for name in sorted({from_mesh, to_mesh})}
    here, there = rows[from_mesh], rows[to_mesh]
    if there.draining_at is not None:
        raise Conflict(f"mesh {to_mesh} is being drained itself")
    if here.capabilities is None or there.capabilities is None:
        raise InvalidInput("mesh", f"{from_mesh if here.capabilities is None else to_mesh} has never had a worker")
    ours, theirs = (MeshCapabilities.model_validate_json(row.capabilities) for row in (here, there))
    reason = ours.why_not_on(theirs)
    if reason is not None:
        raise InvalidInput("mesh", f"{to_mesh}: {reason}")


def _send(transaction: Transaction, lanes: Sequence[str], to_mesh: str) -> None:
    if lanes:
        transaction.execute(f"UPDATE lane SET moving_to = ? WHERE id IN ({placeholders(lanes)})", (to_mesh, *lanes))


def _destination(transaction: Transaction, lane: str) -> str | None:
    row = transaction.execute("SELECT moving_to FROM lane WHERE id = ?", (lane,)).fetchone()
    return None if row is None else row.moving_to


def _hand_over(transaction: Transaction, lane: LockedLane, to_mesh: str) -> None:
    """Where it begins in its tenant's turn there is where the tenant's idle lanes do."""
    transaction.execute(
        "INSERT INTO share (mesh, tenant) VALUES (?, ?) ON CONFLICT (mesh, tenant) DO NOTHING", (to_mesh, lane.tenant)
    )
    transaction.execute(
        "UPDATE lane SET mesh = ?, moving_to = NULL,"
        " vtime = (SELECT lane_vtime FROM share WHERE mesh = ? AND tenant = lane.tenant) WHERE id = ?",
        (to_mesh, to_mesh, lane.id),
    )
    transaction.execute("UPDATE adapter SET mesh = ? WHERE id = ?", (to_mesh, lane.id))
    condition, parameters = _open_operations(lane)
    transaction.execute(
        "UPDATE operation SET mesh = ?, suspicions = suspicions + CASE WHEN state = 'running' THEN 1 ELSE 0 END,"
        f" state = 'queued', claim_epoch = 0 WHERE {condition}",
        (to_mesh, *parameters),
    )


def _open_operations(lane: LockedLane) -> tuple[str, tuple[object, ...]]:
    """Those of a lane that have not ended, by an index: of a million that it had, a few."""
    if lane.ordered:
        return "lane = ? AND seq >= ? AND state IN ('queued', 'running')", (lane.id, lane.head_seq)
    return "mesh = ? AND lane = ? AND kind = 'sample' AND state IN ('queued', 'running')", (lane.mesh, lane.id)
