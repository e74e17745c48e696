"""Waiting for what another thread or process does, with a deadline instead of a guess."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0
"""Long enough that what is waited for will not come any more."""
_LEAST_PAUSE_S = 0.005
_MOST_PAUSE_S = 0.05


def busyness() -> float:
    """How many want each core, at least one: so much longer may take what is promised of a machine of one's own."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Callable[[], object], *, what: str, deadline_s: float = PATIENCE_S) -> None:
    wait_for(condition, what=what, deadline_s=deadline_s)


def wait_for(look: Callable[[], T], *, what: str, deadline_s: float = PATIENCE_S) -> T:
    """Looks again and again until it sees something true, and gives that.

    It takes no core from what it waits for: it pauses longer than it looks, and the longer, the longer it has waited.
    """
    begun_at = looked_at = time.monotonic()
    while not (seen := look()):
        now = time.monotonic()
        if now > begun_at + deadline_s:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 4 * (now - looked_at), (now - begun_at) / 100)))
        looked_at = time.monotonic()
    return seen
