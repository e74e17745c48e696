"""Tasks that nobody awaits."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from twinkle.core.process.background import say_if_it_ends


async def _fail(error: Exception) -> None:
    raise error


async def _last() -> None:
    await asyncio.Event().wait()


async def test_a_task_that_is_to_run_for_ever_is_in_the_log_when_it_fails_and_not_when_it_is_stopped() -> None:
    with capture_logs() as told:
        failing = asyncio.create_task(_fail(RuntimeError("no thread left")), name="sweep")
        stopped = asyncio.create_task(_last(), name="stopped")
        for task in (failing, stopped):
            say_if_it_ends(task)
        stopped.cancel()
        await asyncio.wait([failing, stopped])
        await asyncio.sleep(0)

    assert [(line["event"], line["log_level"], line["task"], line["error"]) for line in told] == [
        ("task.ended", "critical", "sweep", "no thread left")
    ]
