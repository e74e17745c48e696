"""Work that would keep the jobs process from beating its leases: done by processes of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

from twinkle.core.job import JobFailed
from twinkle.core.process.parent_death import dies_with

P = ParamSpec("P")
T = TypeVar("T")


class HeavyWork:
    """A few processes that call functions of a module; they start when first needed. Lives on one event loop."""

    def __init__(self, num_processes: int = 1) -> None:
        self._num_processes = num_processes
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function makes of its arguments, both picklable; what it raises is raised here.

        Raises:
            JobFailed: Transient: a process died, which takes down what the others were at too.
        """
        pool = self._pool = self._pool or self._started()
        try:
            return await asyncio.wrap_future(pool.submit(function, *args, **kwargs))
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None
            pool.shutdown(wait=False)
            raise JobFailed(
                "worker_lost", "the process that did this died, perhaps for lack of memory", is_transient=True
            ) from error

    def stop(self) -> None:
        """End the processes; what they are at is lost. Blocks for a moment."""
        pool, self._pool = self._pool, None
        if pool is not None:
            # There is no public way before Python 3.14.
            for process in (pool._processes or {}).values():
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._num_processes, mp_context=get_context("spawn"), initializer=_live_with, initargs=(os.getpid(),)
        )


def _live_with(parent_pid: int) -> None:
    """Not to outlive the jobs process, even if that is killed."""
    request_signal = dies_with(parent_pid)
    if request_signal is not None:
        request_signal()
