"""How many samples a tenant may have open, counted without a query per sample."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Overloaded
from twinkle.server.threads import Threads
from twinkle.storage.journal import Journal

_RECOUNT_S = 5.0
_RECOUNT_AT_LIMIT_S = 0.25


@dataclass
class _Count:
    """An upper bound: what was open when it was counted, and all that were taken since."""

    num_open: int
    counted_at: float


class SampleQuota:
    """Refuses samples beyond the tenant's limit."""

    def __init__(self, journal: Journal, clock: Clock, threads: Threads, *, max_open: int) -> None:
        self._journal = journal
        self._clock = clock
        self._threads = threads
        self._max_open = max_open
        self._counts: dict[str, _Count] = {}

    async def take(self, tenant: str) -> None:
        """Count one more sample.

        Raises:
            Overloaded: The tenant has too many open ones; its client comes again by itself.
        """
        count = self._counts.get(tenant)
        if count is None or self._is_old(count):
            num_open = await self._threads.run(self._journal.num_open_samples, tenant)
            count = self._counts[tenant] = _Count(num_open, self._clock.now())
        if count.num_open >= self._max_open:
            raise Overloaded(f"{count.num_open} samples are open already, and {self._max_open} may be; come again")
        count.num_open += 1

    def _is_old(self, count: _Count) -> bool:
        limit_s = _RECOUNT_AT_LIMIT_S if count.num_open >= self._max_open else _RECOUNT_S
        return self._clock.now() - count.counted_at > limit_s
