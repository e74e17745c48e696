"""Time that passes when a test says so."""

from __future__ import annotations


class HandClock:
    """A clock that stands still; sleeping moves it."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._stepped = 0.0

    def now(self) -> float:
        return self._now + self._stepped

    def monotonic(self) -> float:
        return self._now

    def step(self, seconds: float) -> None:
        """Somebody sets the machine's clock: no time passes."""
        self._stepped += seconds

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def move(self, seconds: float) -> None:
        self._now += seconds
