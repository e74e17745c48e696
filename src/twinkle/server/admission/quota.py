"""What a tenant may have the API do, known without a query per request: open samples, tokens, bytes held."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import dataclass
from functools import partial

from twinkle.core.clock import Clock
from twinkle.core.errors import Overloaded, StorageUnavailable
from twinkle.server.receiving.body import ByteBudget
from twinkle.server.threads import Shared, Threads
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.records import AdapterLimit
from twinkle.storage.tenants.tenants import TenantAccount, Tenants

_RECOUNT_S = 5.0
_RECOUNT_AT_LIMIT_S = 0.25
_ACCOUNT_TTL_S = 1.0
_LONGEST_RETRY_S = 60
"""The official client waits no longer than that, whatever it is told."""


@dataclass
class _Count:
    """An upper bound: what was open when it was counted, and all that were taken since."""

    num_open: int
    counted_at: float


@dataclass(frozen=True)
class _Known:
    account: TenantAccount
    read_at: float


class Quotas:
    """Refuses what is beyond a tenant's limits, in a way its client comes again after. Lives on one event loop."""

    def __init__(
        self,
        journal: Journal,
        tenants: Tenants,
        clock: Clock,
        threads: Threads,
        *,
        max_body_bytes: int,
        all_body_bytes: int,
        session_timeout_s: float,
    ) -> None:
        """Take what is asked and the limits.

        Args:
            journal: Counts open samples.
            tenants: Their limits and rates.
            clock: What time it is.
            threads: Where both are asked.
            max_body_bytes: Of one request.
            all_body_bytes: Of everybody's requests together; a quarter of it no one tenant can take.
            session_timeout_s: After that silence a session's adapters do not count.
        """
        self._journal = journal
        self._tenants = tenants
        self._clock = clock
        self._threads = threads
        self._counts: dict[str, _Count] = {}
        self._counting: dict[str, asyncio.Lock] = {}
        self._accounts: dict[str, _Known] = {}
        self._readings = Shared[_Known]()
        self._max_body_bytes = max_body_bytes
        self._largest_share = all_body_bytes * 3 // 4
        self._session_timeout_s = session_timeout_s
        self._bodies: dict[str, ByteBudget] = {}

    async def account(self, tenant: str) -> TenantAccount:
        """A tenant's limits and what is left of its rate, at most a second old while the database answers."""
        known = self._accounts.get(tenant)
        if known is None or self._clock.now() - known.read_at > _ACCOUNT_TTL_S:
            try:
                known = await self._readings.get(tenant, partial(self._read_account, tenant))
            except StorageUnavailable:
                if known is None:
                    raise
        return known.account

    async def _read_account(self, tenant: str) -> _Known:
        account = await self._threads.run(self._tenants.account, tenant)
        known = self._accounts[tenant] = _Known(account, self._clock.now())
        return known

    async def take_sample(self, tenant: str, *, is_background: bool = False) -> None:
        """Count one more sample. Those of the background get half of the room, so that others never find it full.

        Raises:
            Overloaded: The tenant has too many open ones, or is above its rate; its client comes again by itself.
        """
        account = await self.account(tenant)
        pause_s = account.paused_until - self._clock.now()
        if pause_s > 0:
            raise Overloaded(
                f"{account.limits.tokens_per_minute} tokens a minute are used up for {pause_s:.0f} s more; come again",
                retry_after_s=min(math.ceil(pause_s), _LONGEST_RETRY_S),
            )
        most = account.limits.max_samples
        if most and is_background:
            most = max(most // 2, 1)
        # One count at a time: the second of two would forget what was taken after the first.
        async with self._counting.setdefault(tenant, asyncio.Lock()):
            count = self._counts.get(tenant)
            if count is None or self._is_old(count, most):
                num_open = await self._threads.run(self._journal.num_open_samples, tenant)
                count = self._counts[tenant] = _Count(num_open, self._clock.now())
        if most and count.num_open >= most:
            raise Overloaded(f"{count.num_open} samples are open already, and {most} may be; come again")
        count.num_open += 1

    async def adapters_of(self, tenant: str) -> AdapterLimit | None:
        """How many adapters a tenant may have, for whoever creates one; ``None`` is no limit."""
        most = (await self.account(tenant)).limits.max_adapters
        live_since = self._clock.now() - self._session_timeout_s
        return AdapterLimit(max_adapters=most, live_since=live_since) if most else None

    async def bodies_of(self, tenant: str) -> ByteBudget:
        """What may be held of a tenant's request bodies; one alone always may."""
        return self.bodies_under(await self.account(tenant))

    def bodies_under(self, account: TenantAccount) -> ByteBudget:
        """The same of a tenant whose account was read just now."""
        limit_bytes = account.limits.max_body_bytes
        budget = self._bodies.get(account.id)
        if budget is None:
            budget = self._bodies[account.id] = ByteBudget(0, of="yours")
        budget.limit_bytes = max(min(limit_bytes or sys.maxsize, self._largest_share), self._max_body_bytes)
        return budget

    def _is_old(self, count: _Count, most: int) -> bool:
        limit_s = _RECOUNT_AT_LIMIT_S if most and count.num_open >= most else _RECOUNT_S
        return self._clock.now() - count.counted_at > limit_s
