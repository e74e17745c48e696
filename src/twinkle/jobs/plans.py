"""Plans: what each kind of job does, and which one does which kind. Adding a kind is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from pydantic import BaseModel

from twinkle.core.job import JobKind, JsonObject
from twinkle.jobs.batch import BatchPlan
from twinkle.jobs.check import CheckPlan
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work
from twinkle.jobs.export import ExportPlan
from twinkle.jobs.groups import FlowPlan, SweepPlan
from twinkle.jobs.ops import OpsPlan
from twinkle.jobs.reinforcement.plan import DistillPlan, ReinforcementPlan
from twinkle.jobs.script import ScriptPlan
from twinkle.jobs.training.plan import PreferencePlan, SupervisedPlan


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


PlanClasses: TypeAlias = Mapping[JobKind, type[Plan]]

PLANS: PlanClasses = {
    JobKind.BATCH: BatchPlan,
    JobKind.CHECK: CheckPlan,
    JobKind.DISTILL: DistillPlan,
    JobKind.EXPORT: ExportPlan,
    JobKind.FLOW: FlowPlan,
    JobKind.OPS: OpsPlan,
    JobKind.PREFERENCE: PreferencePlan,
    JobKind.REINFORCEMENT: ReinforcementPlan,
    JobKind.SCRIPT: ScriptPlan,
    JobKind.SUPERVISED: SupervisedPlan,
    JobKind.SWEEP: SweepPlan,
}
