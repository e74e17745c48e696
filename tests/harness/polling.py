"""Waiting for what another thread or process does, with a deadline instead of a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], object], *, what: str, deadline_s: float = 20.0) -> None:
    wait_for(condition, what=what, deadline_s=deadline_s)


def wait_for(look: Callable[[], T], *, what: str, deadline_s: float = 20.0) -> T:
    """Looks again and again until it sees something true, and gives that."""
    ends_at = time.monotonic() + deadline_s
    while not (seen := look()):
        if time.monotonic() > ends_at:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(0.005)
    return seen
