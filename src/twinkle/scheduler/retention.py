"""When an adapter gets a recovery point, and which of its recovery points stay. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.storage.adapters.snapshots import Kept, Snapshot

FROM_CREATION = -1
"""The floor of a run whose whole history is kept."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How much work a crash may undo: operations, bytes of their payloads, seconds; whichever comes first."""

    every_ops: int
    every_bytes: int
    every_s: float

    def is_due(self, *, num_ops: int, num_bytes: int, age_s: float, has_gradients: bool) -> bool:
        """Whether an adapter with so much behind its last recovery point should get one.

        One with open gradients is a third larger, so it is taken only when a window runs to twice the measure.
        """
        measure = 2 if has_gradients else 1
        if num_ops >= measure * self.every_ops or num_bytes >= measure * self.every_bytes:
            return True
        return not has_gradients and age_s >= self.every_s


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How far back a run can be rebuilt, and how many recovery points that may take.

    ``keep_s`` is how long the steps of a run stay within reach; within it one recovery point in ``every_ops``
    operations is kept, so that a rebuild replays about that many; ``max_snapshots`` bounds what it costs.
    """

    keep_s: float
    every_ops: int
    max_snapshots: int

    def choose(self, snapshots: Sequence[Snapshot], needed_seq: int | None, now: float) -> Kept:
        """The recovery points to keep.

        A load, a fork or a rewind cannot be replayed, only restored, so its recovery point is a start that the
        operations after it need. The newest recovery point always stays.

        Args:
            snapshots: All there are, in the order of their numbers.
            needed_seq: The earliest operation that an accepted fork or rewind still has to go back to.
            now: Unix seconds.
        """
        if not snapshots:
            return Kept(snapshots=(), floor_seq=FROM_CREATION)
        past = [one for one in snapshots if one.created_at <= now - self.keep_s]
        if needed_seq is not None:
            past = [one for one in past if one.seq <= needed_seq]
        floor_seq = past[-1].seq if past else FROM_CREATION
        kept = self._thinned([one for one in snapshots if one.seq >= floor_seq], floor_seq)
        while len(kept) > self.max_snapshots:
            spare = _least_missed(kept, floor_seq)
            if spare is None:
                if needed_seq is not None and kept[1].seq > needed_seq:
                    break
                spare, floor_seq = 0, kept[1].seq
            del kept[spare]
        return Kept(snapshots=tuple(kept), floor_seq=floor_seq)

    def _thinned(self, snapshots: list[Snapshot], floor_seq: int) -> list[Snapshot]:
        kept: list[Snapshot] = []
        for snapshot in snapshots:
            last_seq = kept[-1].seq if kept else floor_seq
            is_bound = snapshot.is_start or snapshot.seq == floor_seq or snapshot is snapshots[-1]
            if is_bound or snapshot.seq - last_seq >= self.every_ops:
                kept.append(snapshot)
        return kept


def _least_missed(kept: Sequence[Snapshot], floor_seq: int) -> int | None:
    """Which one's loss leaves the shortest replay; ``None`` when each is a start, the floor or the last."""
    places = [place for place, one in enumerate(kept[:-1]) if not one.is_start and one.seq != floor_seq]
    before = [floor_seq, *(one.seq for one in kept)]
    return min(places, key=lambda place: kept[place + 1].seq - before[place], default=None)
