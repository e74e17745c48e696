"""What is written to the journal beside the device: task after task, in the order in which they were handed over.

The step loop hands a task over and takes back what it came to, on its own thread, when it next looks. While the device
has nothing to do that could go on meanwhile, a task is done at once and no thread is woken for it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Beside(Protocol):
    """One thread that does task after task; an executor of one thread is one."""

    def submit(self, task: Callable[[], object], /) -> object:
        """Have a task done, which tells itself what it came to."""
        ...

    def shutdown(self, wait: bool = True) -> None:
        """End when all is done."""
        ...


class OneThread:
    """The same with a third of an executor's work for whoever submits: no future is made, and no lock taken in Python.

    It ends when nobody knows it any more, and with the process: what it had not done then was never begun, as when the
    process is killed.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._end = weakref.finalize(self, self._tasks.put, None)
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object], /) -> None:
        """Have a task done. It must not raise."""
        self._tasks.put(task)

    def shutdown(self, wait: bool = True) -> None:
        """End when all is done."""
        self._end()
        if wait:
            self._thread.join()


def _work(tasks: SimpleQueue[Callable[[], object] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        # It may hold much, and the next one may be long in coming.
        del task


class Clerk:
    """Tasks of one worker, in order. From the first that fails on none is done until :meth:`forget`."""

    def __init__(self, beside: Beside, changed: threading.Event) -> None:
        """Take the thread.

        Args:
            beside: One thread.
            changed: Set whenever a task has ended.
        """
        self._beside = beside
        self._changed = changed
        self._handed: deque[Callable[[Any], None]] = deque()
        self._ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        """What each came to, in their order, since one thread does them."""
        self._has_failed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be taken back."""
        return not self._handed

    @property
    def can_go_on(self) -> bool:
        """Whether something can be taken back."""
        return not self._ended.empty()

    def hand(self, task: Callable[[], Result], then: Callable[[Result], None], *, aside: bool) -> None:
        """Have a task done; ``then`` is told, on this thread, what it came to.

        Args:
            task: Runs on another thread unless there is nothing to be done meanwhile.
            then: Called by :meth:`take_back`, or before this returns.
            aside: Whether there is something to be done meanwhile.

        Raises:
            Whatever the task raises, if it is done at once.
        """
        if not aside and self.is_idle:
            then(task())
            return
        self._handed.append(then)
        self._beside.submit(partial(self._do, task))

    def take_back(self) -> bool:
        """Tell what the tasks came to that are done; whether there were any.

        Raises:
            Whatever the first of them raised.
        """
        has_told = False
        while self.can_go_on:
            self._tell_first()
            has_told = True
        return has_told

    def settle(self) -> None:
        """The same, of all that was handed over. Blocks."""
        while self._handed:
            self._tell_first()

    def forget(self) -> None:
        """Wait for what is being done, skip the rest, and tell nothing of any."""
        self._has_failed = True
        while self._handed:
            self._handed.popleft()
            self._ended.get()
        self._has_failed = False

    def close(self) -> None:
        """End the thread; nothing is handed over any more."""
        self._beside.shutdown(wait=True)

    def _tell_first(self) -> None:
        result, error = self._ended.get()
        then = self._handed.popleft()
        if error is not None:
            raise error
        then(result)

    def _do(self, task: Callable[[], object]) -> None:
        if self._has_failed:
            # What comes later counted on it.
            self._tell(None, CancelledError())
            return
        try:
            result = task()
        except BaseException as error:
            self._has_failed = True
            self._tell(None, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._tell(result, None)

    def _tell(self, result: object, error: BaseException | None) -> None:
        self._ended.put((result, error))
        self._changed.set()
