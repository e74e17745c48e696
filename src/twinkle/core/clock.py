"""Time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Unix seconds, seconds that nobody sets, and a pause. Tests pass one they move by hand."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds since some moment, of this process alone; they run on evenly when the machine's clock is set."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment, of this process alone."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)
