"""Does work move? The question behind a liveness check: a worker that renews its lease may still be stuck."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.storage.database import Database


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A mesh on which an operation could run and nothing has begun or ended for too long."""

    mesh: str
    waits_s: float


class Progress:
    """Reads the unfinished operations and the newest of the finished ones."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def stalls(self, *, after_s: float) -> list[Stall]:
        """The meshes where the oldest operation that could run or is running has seen nothing move for so long.

        A lane that waits for a missing number, or for its next attempt, waits for no worker.
        """
        now = self._clock.now()
        waiting = self._database.read(
            "SELECT o.mesh, MIN(o.accepted_at), MAX(o.started_at) FROM operation o JOIN lane l ON l.id = o.lane"
            " WHERE o.state IN ('queued', 'running') AND o.not_before <= ? AND l.not_before <= ?"
            " AND (o.kind = 'sample' OR o.seq = l.head_seq) GROUP BY o.mesh ORDER BY o.mesh",
            (now, now),
        )
        return [
            Stall(mesh=mesh, waits_s=now - oldest)
            for mesh, oldest, begun in waiting
            if max(oldest, begun or 0.0) <= now - after_s and not self._has_ended_one(mesh, since=now - after_s)
        ]

    def _has_ended_one(self, mesh: str, *, since: float) -> bool:
        rows = self._database.read(
            "SELECT 1 FROM operation WHERE finished_at IS NOT NULL AND NOT expired AND finished_at > ? AND mesh = ?"
            " LIMIT 1",
            (since, mesh),
        )
        return bool(rows)
