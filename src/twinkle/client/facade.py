"""From an asynchronous class to a blocking one: an event loop in a thread of its own, and one way to call into it."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
InnerT = TypeVar("InnerT")

_log = logging.getLogger(__name__)


class LoopThread:
    """An event loop that runs in a daemon thread until it is stopped."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run to the end on the loop. Blocks the calling thread, and cancels the work if that is interrupted.

        Raises:
            RuntimeError: It was called on the loop's own thread, as from a callback of a future.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("this is the client's own thread, which may not block: do it in another one")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        """Run on the loop, while the calling thread goes on. What it fails of is in the log."""
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(_say_why)

    def stop(self) -> None:
        """End the thread. Nothing may run on it any more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Facade(Generic[InnerT]):
    """An asynchronous object, and the thread on which everything of it happens."""

    def __init__(self, thread: LoopThread, inner: InnerT) -> None:
        self._thread = thread
        self._inner = inner


def _say_why(ended: Future[object]) -> None:
    if not ended.cancelled() and (error := ended.exception()) is not None:
        _log.error("what went on by itself has failed: %s", error, exc_info=error)


def blocking(
    method: Callable[Concatenate[InnerT, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Facade[InnerT], P], R]:
    """The same method for the facade: with the same arguments, it blocks and gives what the coroutine gives."""

    @functools.wraps(method)
    def call(self: Facade[InnerT], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


def direct(method: Callable[Concatenate[InnerT, P], R]) -> Callable[Concatenate[Facade[InnerT], P], R]:
    """The same method for the facade, where it returns at once and may be called from any thread."""

    @functools.wraps(method)
    def call(self: Facade[InnerT], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._inner, *args, **kwargs)

    return call
