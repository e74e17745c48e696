"""What was accepted before passes whatever the limits say by now: a resend finds its future, or its session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twinkle.core.errors import InvalidInput, LimitReached, Overloaded
from twinkle.core.operation import Submission, Unnumbered
from twinkle.server.admission.holding import HoldingLimits
from twinkle.server.threads import Threads
from twinkle.storage.journal.arrivals import Arrivals
from twinkle.storage.tenants.sessions import NewSession, Sessions


class Resends:
    """Asks the journal only about what a limit has refused, so that it costs nobody else anything."""

    def __init__(self, arrivals: Arrivals, holdings: HoldingLimits, sessions: Sessions, threads: Threads) -> None:
        self._arrivals = arrivals
        self._holdings = holdings
        self._sessions = sessions
        self._threads = threads

    async def admit(self, submission: Submission | Unnumbered) -> None:
        """See :meth:`HoldingLimits.admit`."""
        await self._or_known(self._holdings.admit(submission), lambda: self._arrivals.has(submission))

    async def admit_sample(self, check: Awaitable[None], *, tenant: str, lane: str, seq: int) -> None:
        """Await what judges a sample, and let it pass all the same if there is one of its number."""
        await self._or_known(check, lambda: self._arrivals.has_number(tenant, lane, seq))

    async def take_run(self, tenant: str, is_known: Callable[[], bool]) -> None:
        """See :meth:`HoldingLimits.take_run`; ``is_known`` is asked in a thread whether this run was made before."""
        await self._or_known(self._holdings.take_run(tenant), is_known)

    async def take_run_of_id(self, tenant: str, run: str) -> None:
        """The same of a run that has its id from the client's numbers."""
        await self.take_run(tenant, lambda: self._arrivals.has_lane(tenant, run))

    async def take_sampler(self, tenant: str, sampling_session: str) -> None:
        """See :meth:`HoldingLimits.take_sampler`."""
        await self._or_known(
            self._holdings.take_sampler(tenant), lambda: self._arrivals.has_lane(tenant, sampling_session)
        )

    async def open_session(self, tenant: str, new: NewSession) -> str:
        """Open a session, or find the one that was opened under its key.

        Raises:
            LimitReached: The tenant has as many as it may have.
        """
        try:
            await self._holdings.take_session(tenant)
        except LimitReached:
            opened = await self._threads.run(self._sessions.opened, tenant, new)
            if opened is None:
                raise
            return opened
        return await self._threads.run(self._sessions.open, tenant, new)

    async def _or_known(self, check: Awaitable[None], is_known: Callable[[], bool]) -> None:
        try:
            await check
        except (InvalidInput, LimitReached, Overloaded):
            if not await self._threads.run(is_known):
                raise
