"""What is written to the journal beside the device: task after task, in the order in which they were handed over.

The step loop hands a task over and takes back what it came to, on its own thread, when it next looks. While the device
has nothing to do that could go on meanwhile, a task is done at once and no thread is woken for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Clerk:
    """Tasks of one worker, in order. From the first that fails on none is done until :meth:`forget`."""

    def __init__(self, executor: Executor, changed: threading.Event) -> None:
        """Take the thread.

        Args:
            executor: One thread.
            changed: Set whenever a task has ended.
        """
        self._executor = executor
        self._changed = changed
        self._handed: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()
        self._has_failed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be taken back."""
        return not self._handed

    @property
    def can_go_on(self) -> bool:
        """Whether something can be taken back."""
        return bool(self._handed) and self._handed[0][0].done()

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
        future = self._executor.submit(self._do, task)
        self._handed.append((future, then))
        future.add_done_callback(self._note)

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
            future, _ = self._handed.popleft()
            if not future.cancel():
                future.exception()
        self._has_failed = False

    def close(self) -> None:
        """End the thread; nothing is handed over any more."""
        self._executor.shutdown(wait=True)

    def _tell_first(self) -> None:
        future, then = self._handed.popleft()
        then(future.result())

    def _do(self, task: Callable[[], Result]) -> Result:
        if self._has_failed:
            # What comes later counted on it.
            raise CancelledError
        try:
            return task()
        except BaseException:
            self._has_failed = True
            raise

    def _note(self, _: Future[Any]) -> None:
        self._changed.set()
