"""Where blocking calls go, so that the event loop never does: one small pool per thing that may be slow."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A named pool of threads that can be awaited."""

    def __init__(self, name: str, size: int) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function, on behalf of whoever acts here, and await its answer."""
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, partial(context.run, function, *args, **kwargs)
        )

    def post(self, function: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Call a blocking function; the event loop calls ``then`` with what it answered or raised.

        A third of what :meth:`run` costs the event loop: no future, no task to wake, and it comes round once.
        """
        self._pool.submit(_call, function, asyncio.get_running_loop(), then)

    def stop(self) -> None:
        """Wait for what runs; start nothing more. Blocks."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _call(function: Callable[[], T], loop: asyncio.AbstractEventLoop, then: Callable[[T | Exception], None]) -> None:
    answer: T | Exception
    try:
        answer = function()
    except Exception as error:  # noqa: BLE001 - the border: whoever waits is told, whatever it is
        answer = error
    if not loop.is_closed():
        loop.call_soon_threadsafe(then, answer)


class Shared(Generic[T]):
    """What many want at the same time is looked up once for all of them. Lives on one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[T]] = {}

    async def get(self, name: str, look_up: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the look-up of this name brings that is under way, or one that begins now; raises what it raises."""
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(look_up())
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return await asyncio.shield(task)


class Listings:
    """Reads that may take long: on threads of their own, and of each tenant one at a time. Lives on one event loop.

    So what is asked by the thousand, and cheap, never waits behind what is dear, nor one tenant behind another's lists.
    """

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._turns: dict[str, asyncio.Lock] = {}
        self._num_waiting: Counter[str] = Counter()

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function on behalf of a tenant, behind its earlier ones, and await its answer."""
        self._num_waiting[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()):
                return await self._threads.run(function, *args, **kwargs)
        finally:
            self._num_waiting[tenant] -= 1
            if not self._num_waiting[tenant]:
                del self._num_waiting[tenant], self._turns[tenant]
