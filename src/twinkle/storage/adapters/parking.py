"""Adapters that leave the device: parked while their client is away, or unloaded for ever. And those that stay."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, Payload, Submission
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.lanes import lock_lanes, placeholders, unloaded_error


class Parking:
    """Which adapters lie parked, and which are about to."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def abandoned(self, mesh: str, *, silent_s: float, besides: Sequence[str], limit: int) -> list[tuple[str, int]]:
        """Adapters that are not parked though nothing waits for them and their session has ended or is silent so long.

        Args:
            mesh: Whose adapters.
            silent_s: How long a session may say nothing.
            besides: Adapters that are not meant.
            limit: How many at most.

        Returns:
            Each with the number of its last operation.
        """
        others = ["", *besides]
        rows = self._database.read(
            "SELECT a.id, l.head_seq - 1 AS last_seq FROM adapter a JOIN session s ON s.id = a.session"
            " JOIN lane l ON l.id = a.id"
            " WHERE a.mesh = ? AND a.parked_at IS NULL AND a.pinned_at IS NULL"
            " AND l.ordered AND l.head_kind IS NULL AND l.head_seq > 0 AND l.unload_seq IS NULL"
            " AND (s.finished_at IS NOT NULL OR s.heartbeat_at <= ?)"
            f" AND a.id NOT IN ({placeholders(others)}) ORDER BY a.id LIMIT ?",
            (mesh, self._clock.now() - silent_s, *others, limit),
        )
        return [(row.id, row.last_seq) for row in rows]

    def park(self, adapter: str, *, last_seq: int) -> bool:
        """Note that an adapter lies in the object store only; false when it has got work meanwhile."""
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE adapter SET parked_at = ? WHERE id = ? AND EXISTS"
                " (SELECT 1 FROM lane l WHERE l.id = adapter.id AND l.head_seq = ? AND l.head_kind IS NULL)",
                (self._clock.now(), adapter, last_seq + 1),
            ).rowcount
        return changed == 1

    def resume(self, adapter: str) -> None:
        """Note that an adapter is in use again."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE adapter SET parked_at = NULL WHERE id = ? AND parked_at IS NOT NULL", (adapter,)
            )

    def pin(self, adapter: str, *, is_pinned: bool) -> bool:
        """Keep an adapter on its device once it is there, or no longer; false when there is none of the name."""
        pinned_at = self._clock.now() if is_pinned else None
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE adapter SET pinned_at = ? WHERE id = ?", (pinned_at, adapter)
            ).rowcount
        return changed == 1

    def pinned(self, adapters: Sequence[str]) -> list[str]:
        """Those of these that are pinned, the longest pinned first."""
        if not adapters:
            return []
        rows = self._database.read(
            f"SELECT id FROM adapter WHERE id IN ({placeholders(adapters)}) AND pinned_at IS NOT NULL"
            " ORDER BY pinned_at, id",
            tuple(adapters),
        )
        return [row.id for row in rows]


class Unloading:
    """Adapters that their clients end.

    The operation is numbered behind everything its lane has seen, so what was accepted before is executed before it.
    Checkpoints and the sampling sessions on them stay; what the adapter would be rebuilt from goes once it is done.
    """

    def __init__(self, database: Database, journal: Journal) -> None:
        self._database = database
        self._journal = journal

    def unload(self, adapter: str, tenant: str) -> Accepted:
        """End an adapter in its turn. Doing it again answers the same.

        Raises:
            NotFound: There is no such adapter, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [adapter]).get(adapter)
            if lane is None or lane.tenant != tenant or not lane.ordered:
                raise NotFound(f"no adapter {adapter!r}")
            if lane.unload_seq is not None:
                request_id = request_id_of(adapter, lane.unload_seq)
                return Accepted(request_id=request_id, mesh=lane.mesh, is_new=False)
            submission = Submission(
                tenant=tenant,
                lane=adapter,
                seq=max(lane.max_seq + 1, lane.head_seq),
                kind=OperationKind.UNLOAD_MODEL,
                digest=sha256(b"").hexdigest(),
                payload=Payload(inline=b""),
            )
            accepted = self._journal.append_within(transaction, lane, submission)
            transaction.execute("UPDATE lane SET unload_seq = ? WHERE id = ?", (submission.seq, adapter))
            return accepted

    def is_unloaded(self, adapter: str) -> bool:
        """Whether its client has ended it: nothing new is accepted for it."""
        return bool(self._database.read("SELECT id FROM lane WHERE id = ? AND unload_seq IS NOT NULL", (adapter,)))

    def refuse_unloaded(self, adapter: str) -> None:
        """Raise what everything is answered that comes for an adapter that was unloaded.

        Raises:
            InvalidInput: It was.
        """
        if self.is_unloaded(adapter):
            raise unloaded_error(adapter)
