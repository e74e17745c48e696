"""Sweeps and flows from their submission to their end: what is best, what is handed on, what is said of failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from harness.jobs import JobRig, job_rig
from twinkle.core.job import Job, JobFailed, JobKind, JobState, JsonObject
from twinkle.core.settings import Settings
from twinkle.jobs.context import JobContext
from twinkle.jobs.groups import FlowPlan, SweepPlan
from twinkle.jobs.plans import PlanClasses
from twinkle.wire.bodies.jobs_training import SupervisedSpec
from twinkle.wire.job_groups import expanded

SFT: JsonObject = {"model": "base", "data": "file-1"}


class Train:
    """Trains nothing: its loss is how far the rank is from 16, and rank 13 is unlucky."""

    kind: ClassVar[JobKind] = JobKind.SUPERVISED
    spec_class: ClassVar[type[BaseModel]] = SupervisedSpec

    async def run(self, context: JobContext[SupervisedSpec]) -> JsonObject:
        spec = context.spec
        if spec.rank == 13:
            raise JobFailed("unlucky", "rank 13 brings bad luck")
        await context.save(phase="training")
        return {
            "checkpoint": f"tinker://{context.job.id}",
            "model": spec.model,
            "rank": spec.rank,
            "batch_size": spec.batch_size,
            "eval_loss": abs((spec.rank or 16) - 16),
        }


PLANS: PlanClasses = {plan.kind: plan for plan in (Train, SweepPlan, FlowPlan)}


@pytest.fixture(scope="module")
def groups(settings: Settings) -> Iterator[JobRig]:
    with job_rig(settings, plans=PLANS) as rig:
        yield rig


def submit(rig: JobRig, tenant: str, kind: JobKind, spec: JsonObject) -> Job:
    return rig.stores.jobs.create_groups([expanded(rig.new(tenant, kind, spec))])[0]


def sweep_spec(ranks: list[int], **more: Any) -> JsonObject:
    return {"template": {"kind": "sft", "spec": SFT}, "parameters": {"rank": ranks}, **more}


def run_all(rig: JobRig, tenant: str, job: Job) -> Job:
    """Run whatever is ready of the tenant, until the job has ended."""
    for _ in range(20):
        rig.stores.waiting_jobs.settle()
        ready = rig.stores.waiting_jobs.take_ready(limit=100, again_after_s=60.0)
        for one in ready:
            if one.tenant == tenant:
                rig.run(one.id)
        found = rig.stores.jobs.find(job.id, tenant)
        if found.state.is_final:
            return found
    raise AssertionError(f"{job.id} did not end")


def test_the_best_of_a_sweep_is_told_with_its_parameters_and_its_result(groups: JobRig, tenant: str) -> None:
    sweep = run_all(groups, tenant, submit(groups, tenant, JobKind.SWEEP, sweep_spec([8, 13, 17, 32])))

    assert sweep.state is JobState.SUCCEEDED
    assert sweep.result is not None
    assert sweep.result["counts"] == {"failed": 1, "succeeded": 3}
    assert (sweep.result["metric"], sweep.result["goal"]) == ("eval_loss", "min")
    assert sweep.result["best"] == {
        "checkpoint": f"tinker://{sweep.id}~0002",
        "model": "base",
        "rank": 17,
        "batch_size": "auto",
        "eval_loss": 1,
        "id": f"{sweep.id}~0002",
        "name": "rank=17",
        "parameters": {"rank": 17},
        "value": 1.0,
    }


def test_another_metric_and_another_goal_make_another_best(groups: JobRig, tenant: str) -> None:
    spec = sweep_spec([8, 32], metric="rank", goal="max")
    sweep = run_all(groups, tenant, submit(groups, tenant, JobKind.SWEEP, spec))

    assert sweep.result is not None and sweep.result["best"]["parameters"] == {"rank": 32}


def test_a_sweep_that_requires_all_fails_with_the_reasons_of_those_that_did(groups: JobRig, tenant: str) -> None:
    sweep = run_all(groups, tenant, submit(groups, tenant, JobKind.SWEEP, sweep_spec([8, 13], require="all")))

    assert sweep.state is JobState.FAILED
    assert sweep.failure is not None
    assert (sweep.failure.code, sweep.failure.message) == (
        "members_failed",
        "1 of the sweep's 2 jobs did not succeed: rank=13 failed (rank 13 brings bad luck)",
    )
    assert sweep.failure.details["best"]["rank"] == 8


def test_a_sweep_of_which_nothing_succeeded_has_failed(groups: JobRig, tenant: str) -> None:
    sweep = run_all(groups, tenant, submit(groups, tenant, JobKind.SWEEP, sweep_spec([13])))

    assert sweep.state is JobState.FAILED


def test_a_flow_hands_the_best_of_a_sweep_to_what_comes_after_it(groups: JobRig, tenant: str) -> None:
    flow = submit(
        groups,
        tenant,
        JobKind.FLOW,
        {
            "jobs": {
                "more": {
                    "kind": "sft",
                    "spec": {**SFT, "model": "${search.best.checkpoint}", "batch_size": "${search.best.rank}"},
                },
                "search": {"kind": "sweep", "spec": sweep_spec([8, 17])},
            }
        },
    )

    ended = run_all(groups, tenant, flow)

    assert ended.state is JobState.SUCCEEDED
    assert ended.result is not None
    assert {name: one["state"] for name, one in ended.result["jobs"].items()} == {
        "search": "succeeded",
        "more": "succeeded",
    }
    more = groups.stores.jobs.find(f"{flow.id}~more", tenant)
    assert more.result is not None
    assert (more.result["model"], more.result["batch_size"]) == (f"tinker://{flow.id}~search~0001", 17)


def test_a_reference_to_what_a_result_does_not_have_fails_its_job_by_name(groups: JobRig, tenant: str) -> None:
    jobs = {
        "train": {"kind": "sft", "spec": SFT},
        "more": {"kind": "sft", "spec": {**SFT, "model": "${train.result.chekpoint}"}},
    }
    flow = run_all(groups, tenant, submit(groups, tenant, JobKind.FLOW, {"jobs": jobs}))

    assert flow.state is JobState.FAILED
    more = groups.stores.jobs.find(f"{flow.id}~more", tenant)
    assert more.failure is not None
    assert more.failure.code == "invalid_spec"
    assert "has no 'chekpoint'; did you mean 'checkpoint'?" in more.failure.message


def test_a_cancelled_sweep_ends_cancelled_and_tells_what_had_ended(groups: JobRig, tenant: str) -> None:
    sweep = submit(groups, tenant, JobKind.SWEEP, sweep_spec([8, 17]))
    groups.run(f"{sweep.id}~0000")
    groups.stores.jobs.request_cancel(sweep.id, tenant)

    ended = run_all(groups, tenant, sweep)

    assert ended.state is JobState.CANCELLED
    assert ended.result is not None
    assert ended.result["counts"] == {"cancelled": 1, "succeeded": 1}
    assert ended.result["best"]["rank"] == 8
