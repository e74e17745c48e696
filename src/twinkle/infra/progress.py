"""What a script shows of its long phases: a bar on a terminal, a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Protocol, TextIO

from twinkle.core.process.events import EventLog, event_log
from twinkle.infra.device_mesh import current_rank

QUICK_S = 1.0
"""What is done within this time shows nothing."""
LINE_EVERY_S = 10.0


class Progress(Protocol):
    """How far a phase is."""

    def advance(self, n: int = 1) -> None:
        """So many more are done."""
        ...


class _Silence:
    """What the ranks other than the first show."""

    def advance(self, n: int = 1) -> None:
        pass


NO_PROGRESS: AbstractContextManager[Progress] = nullcontext(_Silence())
"""A phase that shows nothing."""


class _Bar:
    """tqdm's bar, with rate and time left; a phase that is quick never draws it."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, n: int = 1) -> None:
        self._bar.update(n)


class _Lines:
    """A record in the log every so many seconds, and one at the end of what was long enough to have had one."""

    def __init__(
        self, description: str, total: int | None, unit: str, clock: Callable[[], float], log: EventLog
    ) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._clock = clock
        self._log = log
        self._done = 0
        self._start = self._last = clock()

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = self._clock()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            self._log.info("progress", **self._facts(now))

    def finish(self) -> None:
        now = self._clock()
        if now - self._start >= LINE_EVERY_S:
            self._log.info("progress.done", **self._facts(now))

    def _facts(self, now: float) -> dict[str, object]:
        passed = max(now - self._start, 1e-9)
        rate = self._done / passed
        facts: dict[str, object] = {"phase": self._description, "done": self._done, "unit": self._unit}
        if self._total is not None:
            facts["total"] = self._total
        facts["per_s"] = round(rate, 1)
        if self._total is not None and 0 < self._done < self._total:
            facts["left_s"] = round((self._total - self._done) / rate)
        return facts | {"passed_s": round(passed)}


@contextmanager
def track(
    description: str,
    total: int | None = None,
    unit: str = "rows",
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    log: EventLog | None = None,
) -> Iterator[Progress]:
    """Show how far a long phase is, on rank 0 alone, while the block runs.

    Args:
        description: What is done, in a word or two: ``encode``, ``download``.
        total: How many there will be; without it rate and count are shown alone.
        unit: What is counted.
        stream: Where a bar would be drawn; a terminal gets one, anything else lines in the log. Default: stderr.
        clock: Seconds.
        log: Where the lines go. Default: the training library's.
    """
    if current_rank() != 0:
        yield _Silence()
        return
    place = sys.stderr if stream is None else stream
    if place is not None and place.isatty() and find_spec("tqdm") is not None:
        from tqdm import tqdm  # noqa: PLC0415 - a terminal of a machine with torch alone has lines instead

        with tqdm(desc=description, total=total, unit=f" {unit}", file=place, delay=QUICK_S, leave=True) as bar:
            yield _Bar(bar)
        return
    lines = _Lines(description, total, unit, clock, event_log() if log is None else log)
    try:
        yield lines
    finally:
        lines.finish()
