"""What the process that owns the device and its parent know of each other's starts.

The child that owns the device may say that its settings are wrong, fail, hang, or be killed without a word, as where
memory does not suffice; its parent, Celery's, would start another one for ever, or wait for ever. So each start has a
time in which it must end, and is counted in a file that the parent has made: pauses grow, and after some starts in a
row that came to nothing the parent ends with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from twinkle.core.errors import ConfigError

STARTS_FILE = "_TWINKLE_STARTS_FILE"
"""The variable that names the file."""

EXIT_FAILED_START = 75
"""Another child is to be started."""

LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 1.0
_KILLED = (
    "it was killed while it started, and said nothing: memory that does not suffice looks like this"
    " (the system's log tells), and so does a device that fails"
)


@dataclass(frozen=True)
class Starts:
    """How many starts in a row have begun and not succeeded, the one under way included, and what the last one said."""

    number: int = 0
    reason: str = ""
    refusal: str = ""
    """Why no other is to be begun; empty: one may be."""

    @classmethod
    def read(cls) -> Starts:
        """What the file says; nothing has begun where it is empty."""
        text = _file().read_text()
        return cls(**json.loads(text)) if text else cls()

    def _write(self) -> None:
        fresh = _file().with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self)))
        fresh.replace(_file())

    @classmethod
    def begin(cls) -> Starts:
        """Another start begins; what is known of those before it, of which the last was killed if it said nothing."""
        before = cls.read()
        cls(number=before.number + 1)._write()
        return before if before.reason or not before.number else cls(number=before.number, reason=_KILLED)

    @classmethod
    def fail(cls, reason: str) -> Starts:
        """The start under way came to nothing."""
        starts = cls(number=cls.read().number, reason=reason)
        starts._write()
        return starts

    @classmethod
    def fail_if_under_way(cls, reason: str) -> None:
        """This process ends, whoever it is: if it was starting, that start has come to nothing."""
        if STARTS_FILE in os.environ and cls.read().number:
            cls.fail(reason)

    @classmethod
    def succeed(cls) -> None:
        """The start under way has ended well: the next one is the first again."""
        cls()._write()

    @property
    def pause_s(self) -> float:
        """How long to wait before another start, after so many that came to nothing."""
        return 0.0 if not self.number else min(_FIRST_PAUSE_S * 2 ** (self.number - 1), LONGEST_PAUSE_S)


@contextmanager
def within(limit_s: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Call ``give_up``, in a thread of its own, if what is done meanwhile has not ended in that time."""
    timer = threading.Timer(limit_s, give_up)
    timer.name, timer.daemon = "start limit", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse(error: ConfigError) -> None:
    """Leave the reason for the parent and ask it to stop."""
    Starts(number=Starts.read().number, refusal=error.message)._write()
    os.kill(os.getppid(), signal.SIGTERM)


def _file() -> Path:
    return Path(os.environ[STARTS_FILE])
