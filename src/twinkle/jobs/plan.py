"""A plan: what one kind of job does."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel

from twinkle.core.job import JobKind, JsonObject
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work


class Plan(Protocol):
    """A deterministic course of operations: the same spec, data and results so far lead to the same next one.

    A new instance runs each attempt. Whatever process takes a job up runs the plan again from ``context.saved``; what
    it submits a second time has the same numbers and bodies, and is answered with the first time's outcome.
    """

    kind: ClassVar[JobKind]
    spec_class: ClassVar[type[BaseModel]]

    async def run(self, context: JobContext[Any]) -> JsonObject:
        """Do the job; its result.

        Raises:
            JobFailed: It cannot go on; the reason says whether that may pass.
            JobInterrupted: Raised by ``context.save``, to be let through; a plan that catches ``JobCancelled`` to put
                down what there is raises it again.
        """
        ...


@runtime_checkable
class ReckoningPlan(Protocol):
    """A plan that can say what it would take: kinds that have none have no dry run."""

    async def reckon(self, context: JobContext[Any]) -> Work:
        """All that it would have a mesh do; the data are looked at, and nothing is asked of a device.

        Raises:
            JobFailed: The job could not be run.
        """
        ...
