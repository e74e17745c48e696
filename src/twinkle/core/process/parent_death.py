"""Children that do not outlive their parent, not even when it is killed with SIGKILL.

Linux lets a process ask for a signal at its parent's death: certain, from the first instruction on, and for direct
children only. The supervisor's guard covers the rest.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def dies_with(parent_pid: int) -> Callable[[], None] | None:
    """What a child runs between fork and exec so that it dies with ``parent_pid``; ``None`` where it cannot be had.

    The kernel ties the signal to the *thread* that forks: call it for children started by the main thread.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def request_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before we asked
            os._exit(1)

    return request_signal
