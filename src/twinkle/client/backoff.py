"""How long to wait before a request is sent again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Delays that double, with jitter, so that clients of a server that came back do not arrive together."""

    first_s: float = 0.1
    longest_s: float = 10.0
    give_up_after_s: float = 300.0
    """Counted from the first attempt; polls for outcomes never give up."""
    draw: Callable[[], float] = random.random

    def delay_s(self, attempt: int, *, retry_after_s: float = 0.0) -> float:
        """The pause after attempt number ``attempt``, from 0: between half and all of the doubled delay.

        What the server asked for in ``Retry-After`` is waited in any case, and the jitter comes on top.
        """
        delay_s = min(self.first_s * 2.0 ** min(attempt, 30), self.longest_s)
        return retry_after_s + delay_s * (0.5 + 0.5 * self.draw())
