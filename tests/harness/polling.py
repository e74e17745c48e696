"""Waiting for what another thread or process does, with a deadline instead of a guess."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, what: str, deadline_s: float = 20.0) -> None:
    ends_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"not within {deadline_s} s: {what}")
        time.sleep(0.005)
