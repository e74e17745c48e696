"""A process that outlives the supervisor for a moment: it ends what a killed supervisor has left behind.

It reads ``+PGID`` and ``-PGID`` lines from its standard input, whose other end only the supervisor holds. The end of
input is the supervisor's death, however it died; then every process group still on the list is killed. The kernel
itself ends the supervisor's direct children on Linux (``parent_death``), but not what those have started, and on macOS
nobody. Run by its path, so that it imports nothing and weighs little.
"""

from __future__ import annotations

import os
import signal
import sys


def watch() -> None:
    """Keep the list until the input ends, then kill what is on it."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its input and not before
    watch()
