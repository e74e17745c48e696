"""Which plan does which kind of job. Adding a kind is one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from twinkle.core.job import JobKind
from twinkle.jobs.batch import BatchPlan
from twinkle.jobs.check import CheckPlan
from twinkle.jobs.export import ExportPlan
from twinkle.jobs.groups import FlowPlan, SweepPlan
from twinkle.jobs.ops import OpsPlan
from twinkle.jobs.plan import Plan
from twinkle.jobs.reinforcement.plan import DistillPlan, ReinforcementPlan
from twinkle.jobs.script import ScriptPlan
from twinkle.jobs.training.plan import PreferencePlan, SupervisedPlan

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
