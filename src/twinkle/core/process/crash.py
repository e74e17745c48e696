"""Named places at which a test lets a process die or freeze, so that recovery is tried at its narrow moments.

Off unless the environment names a folder in ``TWINKLE_TEST_CRASH_AT``; then a file in it that is named after a point,
such as ``worker.executed``, arms that point. It holds a count and a signal: ``3 KILL`` lets the process that comes by
for the third time kill itself, ``1 STOP`` freezes it until somebody sends SIGCONT. A point fires once: its file is
renamed to ``*.fired`` first; with a count of 0 it stays armed for whoever comes by. The points are listed in
``docs/recovery.md``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "TWINKLE_TEST_CRASH_AT"

_FOLDER = os.environ.get(VARIABLE)


def crash_point(name: str) -> None:
    """Die here if a test wants it; otherwise this is one comparison."""
    if _FOLDER is not None:
        _pass(Path(_FOLDER) / name)


def _pass(armed: Path) -> None:
    try:
        count, name = armed.read_text().split()
        if int(count) > 1:
            rest = armed.with_name(f".{armed.name}.{os.getpid()}")
            rest.write_text(f"{int(count) - 1} {name}")
            rest.replace(armed)
            return
        if int(count) == 1:
            armed.rename(armed.with_name(f"{armed.name}.fired"))
    except FileNotFoundError:  # not armed, or another thread was first
        return
    os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
