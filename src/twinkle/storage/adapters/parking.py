"""Adapters whose client has gone: parked in the object store until somebody uses them again. And those that stay."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.clock import Clock
from twinkle.storage.database import Database
from twinkle.storage.journal.lanes import placeholders


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
            " AND l.ordered AND l.head_kind IS NULL AND l.head_seq > 0"
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
