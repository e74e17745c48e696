"""A forwarder that has a thread of its own: whatever its tool waits for, training does not wait with it."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Mapping

from twinkle.core.process.events import event_log
from twinkle.metric.forwarders import Forwarder

log = event_log()

OPEN_S = 20.0
"""How long a script waits for a tool to open, which may ask for a key on the terminal."""
CLOSE_S = 20.0
"""How long the end of a script waits for what was not sent yet."""
MOST_WAITING = 10_000
"""Records that a tool may be behind."""
GOES_ON = "training goes on; nothing more is sent there"


class ForwardingThread:
    """Opens a tool, sends to it and closes it in one thread, since some know a run in the thread that began it alone.

    What goes wrong is told once in the log, and nothing more is sent.

    Args:
        name: How the log calls it.
        make: Opens the tool.
        open_s: Seconds that the constructor waits for it to open; it may open later as well.
        most_waiting: Records that may wait; a tool that is further behind gets nothing more.
    """

    def __init__(
        self, name: str, make: Callable[[], Forwarder], *, open_s: float = OPEN_S, most_waiting: int = MOST_WAITING
    ) -> None:
        self.name = name
        self._make = make
        self._most_waiting = most_waiting
        self._waiting: deque[tuple[Mapping[str, float], int]] = deque()
        self._changed = threading.Condition()
        self._is_open = self._is_closing = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"twinkle-forwarding-{name}", daemon=True)
        atexit.register(self.close)
        self._thread.start()
        with self._changed:
            is_quick = self._changed.wait_for(lambda: self._is_open or self._has_ended, open_s)
        if not is_quick:
            log.warning(
                "metric.forwarding.slow",
                forwarder=name,
                reason=f"it has not opened within {open_s:g} s",
                next="training goes on; what waits is sent there once it has",
            )

    @property
    def has_ended(self) -> bool:
        """It was closed, or has failed."""
        return self._has_ended

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See ``Forwarder``. Returns at once."""
        with self._changed:
            if len(self._waiting) < self._most_waiting:
                self._waiting.append((values, step))
                self._changed.notify_all()
                return
        self._end(f"it is {self._most_waiting} records behind", GOES_ON)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Let it send what waits and end its run, for so many seconds at most."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(wait_s)
        if self._thread.is_alive():
            self._end(f"it has not taken everything within {wait_s:g} s", "what was left is not sent there")

    def _run(self) -> None:
        try:
            tool = self._make()
            # After the tool's own, and so called before that: at the end of a script what waits is sent, then it ends.
            atexit.register(self.close)
            with self._changed:
                self._is_open = True
                self._changed.notify_all()
            while (record := self._next()) is not None:
                tool.log(*record)
            tool.close()
        except Exception as error:  # noqa: BLE001 - whatever a tool's server or files provoke must not end a training
            self._end(f"{type(error).__name__}: {error}", GOES_ON)
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _next(self) -> tuple[Mapping[str, float], int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing or self._has_ended)
            return self._waiting.popleft() if self._waiting and not self._has_ended else None

    def _end(self, error: str, then: str) -> None:
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            self._waiting.clear()
            self._changed.notify_all()
        log.warning("metric.forwarding.failed", forwarder=self.name, error=error, next=then)
