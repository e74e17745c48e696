"""Waiting for several: in threads and in event loops alike."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Generic, TypeVar

from twinkle.client.promise import Promise

T = TypeVar("T")
PromiseT = TypeVar("PromiseT", bound=Promise[object])


def gather(*promises: Promise[T]) -> Promise[list[T]]:
    """All values in the order given; as soon as one fails, its error.

    Raises:
        ValueError: There is nothing to wait for.
    """
    if not promises:
        raise ValueError("gather: needs at least one future")
    together: Promise[list[T]] = Promise(promises[0].loop)
    lock = threading.Lock()
    num_open = len(promises)

    def note(promise: Promise[T]) -> None:
        nonlocal num_open
        error = promise.exception()
        if error is not None:
            together.set_exception(error)
        with lock:
            num_open -= 1
            is_last = num_open == 0
        if is_last and not together.done():
            together.set_result([promise.result() for promise in promises])

    for promise in promises:
        promise.add_done_callback(note)
    return together


def as_completed(promises: Iterable[PromiseT], *, timeout: float | None = None) -> Completions[PromiseT]:
    """The same objects, each as soon as it is done: for ``for`` and for ``async for``.

    Args:
        promises: What to wait for.
        timeout: Seconds for all of them together; then the loop raises ``TimeoutError``.
    """
    return Completions(list(promises), timeout)


class Completions(Generic[PromiseT]):
    """What :func:`as_completed` gives; goes through once."""

    def __init__(self, promises: list[PromiseT], timeout_s: float | None) -> None:
        self._promises = promises
        self._timeout_s = timeout_s

    def __iter__(self) -> Iterator[PromiseT]:
        done: queue.SimpleQueue[PromiseT] = queue.SimpleQueue()
        ends_at = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        for promise in self._promises:
            promise.check_may_block()
            promise.add_done_callback(done.put)
        for _ in self._promises:
            try:
                yield done.get(timeout=None if ends_at is None else max(0.0, ends_at - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(self._complaint()) from None

    async def __aiter__(self) -> AsyncIterator[PromiseT]:
        done: asyncio.Queue[PromiseT] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ends_at = None if self._timeout_s is None else loop.time() + self._timeout_s

        def put(promise: PromiseT) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.put_nowait, promise)

        for promise in self._promises:
            promise.add_done_callback(put)
        for _ in self._promises:
            try:
                async with asyncio.timeout_at(ends_at):
                    promise = await done.get()
            except TimeoutError:
                raise TimeoutError(self._complaint()) from None
            yield promise

    def _complaint(self) -> str:
        num_open = sum(not promise.done() for promise in self._promises)
        return f"{num_open} of {len(self._promises)} futures were not done after {self._timeout_s} s"
