"""Where blocking calls go, so that the event loop never does: one small pool per thing that may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import structlog

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.get_logger()


def say_if_it_ends(task: asyncio.Task[None]) -> None:
    """Have it in the log when a task that is to run for ever ends with an error: nobody else would ask it."""
    task.add_done_callback(_say_why)


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("task.ended", task=task.get_name(), error=str(error), exc_info=error)


class Threads:
    """A named pool of threads that can be awaited."""

    def __init__(self, name: str, size: int) -> None:
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function and await its answer."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    def stop(self) -> None:
        """Wait for what runs; start nothing more. Blocks."""
        self._pool.shutdown(wait=True, cancel_futures=True)
