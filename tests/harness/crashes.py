"""The other end of ``twinkle.core.process.crash``: arms the named points of a running service."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness.polling import wait_until
from twinkle.core.process.crash import VARIABLE

BY_A_JOB = {
    "job.claimed": 1,
    "job.saving": 6,
    "job.saved": 6,
    "job.worked": 1,
    "job.ended": 1,
    "api.committed": 24,
    "api.nudged": 24,
    "journal.append": 20,
    "journal.commit": 20,
    "worker.claimed": 12,
    "worker.executed": 12,
    "worker.committed": 12,
    "snapshot.stored": 1,
    "checkpoint.file_stored": 1,
    "housekeeping.dispatching": 2,
}
"""Points that whoever does a job's work comes by, and about how often at most."""


class Crashes:
    """The folder in which points are armed. Give :attr:`variables` to the service's environment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: str(self._folder)}

    def arm(self, point: str, *, count: int = 1, signal: str = "KILL") -> None:
        """The process that comes by for the ``count``-th time gets the signal."""
        self._fired(point).unlink(missing_ok=True)
        fresh = self._folder / f".{point}.new"
        fresh.write_text(f"{count} {signal}")
        fresh.replace(self._folder / point)

    @contextmanager
    def drawn(
        self, seed: int, points: Mapping[str, int] = BY_A_JOB, *, num_points: int = 4
    ) -> Iterator[dict[str, tuple[int, bool]]]:
        """Kill at some points, each at one of the times that somebody comes by, all drawn by chance.

        Gives by point that time, and, at the end, whether it has come to it; that of at least one has.
        """
        draw = random.Random(seed)
        counts = {point: draw.randint(1, most) for point, most in draw.sample(sorted(points.items()), num_points)}
        told = {point: (count, False) for point, count in counts.items()}
        for point, count in counts.items():
            self.arm(point, count=count)
        try:
            yield told
        finally:
            for point in counts:
                self.disarm(point)
            told |= {point: (count, self.has_fired(point)) for point, count in counts.items()}
            print(told)
        assert any(has_fired for _, has_fired in told.values()), told

    def disarm(self, point: str) -> None:
        (self._folder / point).unlink(missing_ok=True)

    def has_fired(self, point: str) -> bool:
        return self._fired(point).exists()

    def wait(self, point: str, *, deadline_s: float = 30.0) -> float:
        """Wait until it has fired; when that was, in Unix seconds."""
        wait_until(lambda: self.has_fired(point), what=f"somebody comes by {point}", deadline_s=deadline_s)
        return self._fired(point).stat().st_ctime

    def _fired(self, point: str) -> Path:
        return self._folder / f"{point}.fired"
