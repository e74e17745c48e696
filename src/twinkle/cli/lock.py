"""One ``twinkle serve`` per home."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinkle.core.errors import ConfigError

_LOCK_FILE = "serve.lock"


@contextmanager
def sole_owner(home: Path) -> Iterator[None]:
    """Hold the home for this process; the kernel lets go of it when the process ends, however it ends.

    Raises:
        ConfigError: Another process holds it.
    """
    with (home / _LOCK_FILE).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"another `twinkle serve` (pid {holder}) runs on {home}; stop it first, or choose another --home"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
