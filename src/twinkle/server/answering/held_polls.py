"""Polls that are held until there is news of what they ask about: woken by a message, and by a sweep if it was lost."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from twinkle.core.process.background import say_if_it_ends

T = TypeVar("T")


class Waiter:
    """One held poll."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()


WaiterT = TypeVar("WaiterT", bound=Waiter)


class HeldPolls(ABC, Generic[WaiterT]):
    """Everyone who waits, by what for. Lives on one event loop; only :meth:`_tell` is for other threads."""

    def __init__(self, *, sweep_s: float) -> None:
        self._sweep_s = sweep_s
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[str, set[WaiterT]] = {}
        self._released = False
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sweep."""
        self._sweeper = self._loop.create_task(self._sweep_forever(), name="held polls")
        say_if_it_ends(self._sweeper)

    async def stop(self) -> None:
        """End; nobody may wait any more."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def release(self) -> None:
        """Let all held polls go, and those to come: the server is about to stop."""
        self._released = True
        self._wake(set(self._waiters))

    @abstractmethod
    async def _sweep(self) -> None:
        """Wake those whose message was lost: one query for all that are held, however many."""

    async def _held(
        self,
        key: str,
        waiter: WaiterT,
        *,
        read: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
        timeout_s: float,
    ) -> T | None:
        """What there is to read as soon as it is enough, or the server stops; ``None`` when the time was up meanwhile.

        The waiter is registered first and read second, so nothing falls between the two; the sweep stands behind lost
        messages.
        """
        self._waiters.setdefault(key, set()).add(waiter)
        ends_at = self._loop.time() + timeout_s
        try:
            while True:
                waiter.woken.clear()
                found = await read()
                left_s = ends_at - self._loop.time()
                if is_enough(found) or left_s <= 0 or self._released:
                    return found
                try:
                    async with asyncio.timeout(left_s):
                        await waiter.woken.wait()
                except TimeoutError:
                    return None
        finally:
            self._waiters[key].discard(waiter)
            if not self._waiters[key]:
                del self._waiters[key]

    def _tell(self, keys: set[str]) -> None:
        """Wake who waits for these. Callable from any thread, also when the loop is about to end."""
        # Whoever registers after this look reads after it, and what this is about was written before.
        waited_for = [key for key in keys if key in self._waiters]
        if waited_for and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, waited_for)

    def _wake(self, keys: Iterable[str]) -> None:
        for key in keys:
            for waiter in self._waiters.get(key, ()):
                waiter.woken.set()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            await self._sweep()
