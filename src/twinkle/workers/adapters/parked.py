"""Adapters in memory: how far each is, on the device or parked.

Those parked had to leave the device but not the process: they are one copy in host memory away from going on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic

from twinkle.scheduler.retention import Pace
from twinkle.workers.adapters.snapshots import Writing
from twinkle.workers.engine import State, StateCopy


@dataclass
class Coverage:
    """How far an adapter in memory is, and how much of that a snapshot in the object store covers.

    It has every operation up to ``applied_seq`` applied. ``snapshot_seq`` is the last operation that a snapshot was to
    cover, ``unsaved_bytes`` the payloads since; ``writing`` is that snapshot, unless it was there before.
    """

    applied_seq: int
    snapshot_seq: int
    snapshot_at: float
    used_at: float
    unsaved_bytes: int = 0
    writing: Writing | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a snapshot of the present state is in the object store, or about to be."""
        has_failed = self.writing is not None and self.writing.done() and not self.writing.result()
        return self.applied_seq <= self.snapshot_seq and not has_failed

    def is_due(self, pace: Pace, seq: int, *, now: float, has_gradients: bool) -> bool:
        """Whether the state after operation ``seq`` is to be a recovery point."""
        return pace.is_due(
            num_ops=seq - self.snapshot_seq,
            num_bytes=self.unsaved_bytes,
            age_s=now - self.snapshot_at,
            has_gradients=has_gradients,
        )


@dataclass
class Resident(Generic[State]):
    """An adapter on the device.

    ``done_seq`` is the last operation done with it, which may not be committed yet; ``copied`` is the state right after
    such a one, and its number: it becomes a recovery point when that one is committed.
    """

    state: State
    coverage: Coverage
    done_seq: int
    copied: tuple[int, StateCopy] | None = None


@dataclass(frozen=True)
class ParkedAdapter:
    """An adapter as ``Engine.snapshot`` wrote it, open gradients included."""

    data: bytes
    coverage: Coverage


class Parked:
    """At most ``limit_bytes`` of adapters in host memory; those parked first leave first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._adapters: OrderedDict[str, ParkedAdapter] = OrderedDict()

    def put(self, adapter: str, parked: ParkedAdapter) -> list[tuple[str, ParkedAdapter]]:
        """Take an adapter in; those that have to leave for it (itself, when it is larger than the limit)."""
        self.take(adapter)
        self._adapters[adapter] = parked
        self._size_bytes += len(parked.data)
        leaving: list[tuple[str, ParkedAdapter]] = []
        while self._size_bytes > self._limit_bytes:
            name, left = self._adapters.popitem(last=False)
            self._size_bytes -= len(left.data)
            leaving.append((name, left))
        return leaving

    def take(self, adapter: str) -> ParkedAdapter | None:
        """Give an adapter out, if it is here."""
        parked = self._adapters.pop(adapter, None)
        if parked is not None:
            self._size_bytes -= len(parked.data)
        return parked

    def get(self, adapter: str) -> ParkedAdapter | None:
        """An adapter, if it is here; it stays."""
        return self._adapters.get(adapter)

    def items(self) -> list[tuple[str, ParkedAdapter]]:
        """Everything that is parked."""
        return list(self._adapters.items())

    def clear(self) -> None:
        """Forget everything."""
        self._adapters.clear()
        self._size_bytes = 0
