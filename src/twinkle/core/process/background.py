"""Tasks that nobody awaits: what they fail of is told all the same."""

from __future__ import annotations

import asyncio

import structlog

_log = structlog.get_logger()


def say_if_it_ends(task: asyncio.Task[None]) -> None:
    """Have it in the log when a task that is to run for ever ends with an error: nobody else would ask it."""
    task.add_done_callback(_say_why)


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("task.ended", task=task.get_name(), error=str(error), exc_info=error)
