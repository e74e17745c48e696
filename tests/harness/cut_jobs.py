"""Attempts at jobs that end as by a kill: at a save, before anything was written or right behind it."""

from __future__ import annotations

from typing import Any

from twinkle.core.job import JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.plans import Plan


class Cut(Exception):
    """The process is gone."""


class Cuts:
    """Where the next attempt is cut off: at which save, and whether that one was still written."""

    def __init__(self) -> None:
        self.at: tuple[int, bool] | None = None

    def into(self, plan_class: type[Plan]) -> type[Plan]:
        """The same plan, cut off where this says."""
        cuts = self

        class CutPlan(plan_class):  # type: ignore[misc, valid-type]
            async def run(self, context: JobContext[Any]) -> JsonObject:
                cuts.arm(context)
                return await super().run(context)

        return CutPlan

    def arm(self, context: JobContext[Any]) -> None:
        """Cut this attempt off, and no later one."""
        if self.at is None:
            return
        (number, is_written), self.at = self.at, None
        save, seen = context.save, 0

        async def cut(*arguments: Any, **named: Any) -> None:
            nonlocal seen
            seen += 1
            if seen == number and not is_written:
                raise Cut
            await save(*arguments, **named)
            if seen == number:
                raise Cut

        context.save = cut  # type: ignore[method-assign]
