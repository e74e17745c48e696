"""How many meshes of one kind there are to be, by how much waits for them, and which of their work a new one takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True, kw_only=True)
class ReplicaRule:
    """Between how many meshes, and when there is one more or one less.

    Ray Serve's rule: so many meshes that each has ``operations_each`` unfinished operations, once that has held for a
    while.
    """

    least: int
    most: int
    operations_each: int
    grow_after_s: float
    shrink_after_s: float

    def wanted(self, *, num_open: int, num_busy: int) -> int:
        """How many meshes are to be.

        Args:
            num_open: Operations that have not ended.
            num_busy: Runs and sampling sessions that they are of; a run is at one mesh, so more meshes would be idle.
        """
        return max(self.least, min(self.most, num_busy, ceil(num_open / self.operations_each)))


@dataclass
class ReplicaWatch:
    """Since when more meshes are wanted than there are, or fewer."""

    rule: ReplicaRule
    _grows_since: float | None = field(default=None, init=False)
    _shrinks_since: float | None = field(default=None, init=False)
    _most_since: int = field(default=0, init=False)
    """The most that were wanted since then."""
    _num_meshes: int = field(default=0, init=False)

    def number(self, *, num_open: int, num_busy: int, num_meshes: int, now_s: float) -> int:
        """How many meshes there are to be now; as many as there are until it has held for long enough.

        One is given back that was wanted at no moment of that time.
        """
        wanted = self.rule.wanted(num_open=num_open, num_busy=num_busy)
        if num_meshes != self._num_meshes:
            self._num_meshes, self._shrinks_since = num_meshes, None
        self._most_since = wanted if self._shrinks_since is None else max(wanted, self._most_since)
        self._grows_since = _since(self._grows_since, wanted > num_meshes, now_s)
        self._shrinks_since = _since(self._shrinks_since, wanted < num_meshes, now_s)
        for since, after_s, number in (
            (self._grows_since, self.rule.grow_after_s, wanted),
            (self._shrinks_since, self.rule.shrink_after_s, self._most_since),
        ):
            if since is not None and now_s - since >= after_s:
                return number
        return num_meshes


def even_out(lanes: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Which lanes go to which mesh, so that none has two more of those at work than another; as few as can be.

    Args:
        lanes: Those with work, by the name of their mesh; a mesh without any is named too.
    """
    held = {mesh: list(ids) for mesh, ids in sorted(lanes.items())}
    moves = []
    while held:
        fullest = max(held, key=lambda mesh: len(held[mesh]))
        emptiest = min(held, key=lambda mesh: len(held[mesh]))
        if len(held[fullest]) - len(held[emptiest]) < 2:
            break
        lane = held[fullest].pop()
        held[emptiest].append(lane)
        moves.append((lane, emptiest))
    return moves


def _since(before: float | None, holds: bool, now_s: float) -> float | None:
    return (now_s if before is None else before) if holds else None
