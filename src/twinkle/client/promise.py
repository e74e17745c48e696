"""A value that comes later, to be awaited in any event loop or waited for in any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Generator
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """The value or the error of something that goes on elsewhere. Safe to use from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """``loop`` is the one whose progress brings the value."""
        self.loop = loop
        self._inner: concurrent.futures.Future[T] = concurrent.futures.Future()

    def done(self) -> bool:
        """Whether the value or the error is there."""
        return self._inner.done()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, at most ``timeout`` seconds. Blocks.

        Raises:
            TimeoutError: The time is up; what is waited for goes on.
            RuntimeError: It was called where only ``await`` can work.
            TwinkleError: What is waited for ended in an error.
        """
        self.check_may_block()
        return self._inner.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, for the error, or ``None`` when there is a value."""
        self.check_may_block()
        return self._inner.exception(timeout)

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback`` with this object when it is done, on the client's own thread; at once if it is."""
        self._inner.add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the value. Cancelling the wait cancels nothing else."""
        return self._wait().__await__()

    def set_result(self, value: T) -> None:
        """For who made the promise: keep it. The first outcome counts."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._inner.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """For who made the promise: break it. The first outcome counts."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._inner.set_exception(error)

    def check_may_block(self) -> None:
        """Refuse a wait that would keep the value from ever coming.

        Raises:
            RuntimeError: This is the loop that brings the value.
        """
        if not self._inner.done() and _running_loop() is self.loop:
            raise RuntimeError("this would wait for itself: use `await` here, or ask again when it is done()")

    async def _wait(self) -> T:
        if not self._inner.done():
            loop = asyncio.get_running_loop()
            woken: asyncio.Future[None] = loop.create_future()
            self._inner.add_done_callback(lambda _: _wake(loop, woken))
            await woken
        return self._inner.result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(_settle, woken)


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
