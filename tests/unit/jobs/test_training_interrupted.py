"""Fine-tunings that are cut off, fail in the middle, or are run by two at once: what comes of them is the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from harness.fake_worker import FakeWorker
from harness.jobs import JobRig, job_rig
from harness.training_jobs import MemoryTools, metrics_of, run_of, spec_of
from twinkle.core.job import Job, JobKind, JobState, JsonObject
from twinkle.core.operation import Claim, Failure, FailureCategory, OperationKind
from twinkle.core.settings import Settings
from twinkle.jobs.context import JobContext
from twinkle.jobs.training.plan import PreferencePlan, SupervisedPlan

SFT, DPO = JobKind.SUPERVISED, JobKind.PREFERENCE
SPEC = {"steps": 7, "batch_size": 3, "eval_fraction": 0.2, "eval_every": 2, "checkpoint_every": 3, "seed": 11}


class Cut(Exception):
    """The process is gone."""


class Cuts:
    """At which save an attempt ends, as by a kill: before anything was written, or right behind it."""

    at: ClassVar[tuple[int, bool] | None] = None

    @classmethod
    def into(cls, context: JobContext[Any]) -> None:
        if cls.at is None:
            return
        (number, is_written), cls.at = cls.at, None
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


class CutSupervised(SupervisedPlan):
    async def run(self, context: JobContext[Any]) -> JsonObject:
        Cuts.into(context)
        return await super().run(context)


class CutPreference(PreferencePlan):
    async def run(self, context: JobContext[Any]) -> JsonObject:
        Cuts.into(context)
        return await super().run(context)


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker) -> Iterator[JobRig]:
    with job_rig(settings, plans={SFT: CutSupervised, DPO: CutPreference}, tools=MemoryTools()) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_left(worker: FakeWorker) -> Iterator[None]:
    yield
    Cuts.at = worker.failing = None


def told(job: Job) -> JsonObject:
    """A result without what says which job it was."""
    assert job.result is not None, job.failure
    hidden = {"run", "checkpoint", "sampler_checkpoint", "checkpoints"}
    return {name: value for name, value in job.result.items() if name not in hidden}


def done_in(worker: FakeWorker, job: Job) -> list[tuple[int, OperationKind, bytes]]:
    run = run_of(job)
    return [
        (claim.seq, claim.kind, worker.payload(claim).replace(run.encode(), b"RUN"))
        for claim in worker.executed_of(run)
        if claim.seq
    ]


@pytest.mark.parametrize("kind", [SFT, DPO])
def test_wherever_an_attempt_is_cut_off_the_next_one_goes_on_and_nothing_is_done_twice(
    rig: JobRig, tenant: str, worker: FakeWorker, kind: JobKind
) -> None:
    calm = rig.do(tenant, kind, spec_of(**SPEC))
    assert calm.failure is None
    cuts = [(number, is_written) for number in range(1, 12) for is_written in (False, True)]
    num_cut = 0
    for place in cuts:
        job = rig.submit(tenant, kind, spec_of(**SPEC), max_attempts=5)
        Cuts.at = place
        first = rig.run(job.id)
        assert first is not None
        num_cut += first.state is JobState.RETRYING
        if first.state is JobState.RETRYING:
            rig.run(job.id)
        ended = rig.stores.jobs.find(job.id, tenant)

        assert ended.state is JobState.SUCCEEDED, (place, ended.failure)
        assert told(ended) == told(calm), place
        assert metrics_of(rig, ended) == metrics_of(rig, calm), place
        assert done_in(worker, ended) == done_in(worker, calm), place
    assert num_cut >= 14, "otherwise little was cut off"


def test_a_failure_of_the_service_s_is_gone_past_by_a_new_run_from_the_last_checkpoint(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    calm = rig.do(tenant, SFT, spec_of(**SPEC))
    job = rig.submit(tenant, SFT, spec_of(**SPEC), max_attempts=5)
    steps = 0

    def fails_once(claim: Claim) -> Failure | None:
        nonlocal steps
        if claim.kind is OperationKind.OPTIM_STEP and claim.tenant == tenant:
            steps += 1
            if steps == 5:
                return Failure(message="took its worker down", category=FailureCategory.SERVER, code="poison")
        return None

    worker.failing = fails_once
    first = rig.run(job.id)
    assert first is not None and first.state is JobState.RETRYING
    rig.run(job.id)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.failure is None
    assert run_of(ended).endswith(":train:1")
    new = worker.executed_of(run_of(ended))
    assert new[0].kind is OperationKind.LOAD_WEIGHTS
    assert len([claim for claim in new if claim.kind is OperationKind.OPTIM_STEP]) == 7 - 3
    assert told(ended)["trained_tokens"] == told(calm)["trained_tokens"]
    assert (ended.result or {})["step"] == 7


def test_rows_that_an_operation_fails_of_are_named(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    def refuses(claim: Claim) -> Failure | None:
        if claim.kind is OperationKind.FORWARD_BACKWARD and claim.seq > 3:
            return Failure(message="a gradient is not finite", category=FailureCategory.USER, code="user")
        return None

    worker.failing = refuses
    job = rig.do(tenant, SFT, spec_of(steps=4, batch_size=2, seed=1))

    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert job.failure.message.startswith("step 3: ")
    assert "a gradient is not finite; in it were rows " in job.failure.message
    assert len(job.failure.details["rows"]) == 2
    assert f"rows {', '.join(str(row) for row in job.failure.details['rows'])} of file-a" in job.failure.message


def test_changed_data_are_not_trained_on_in_the_middle(settings: Settings, worker: FakeWorker, tenant: str) -> None:
    tools = MemoryTools()
    with job_rig(settings, plans={SFT: CutSupervised}, tools=tools) as rig:
        job = rig.submit(tenant, SFT, spec_of(**SPEC), max_attempts=5)
        Cuts.at = (4, True)
        rig.run(job.id)
        tools.digest = "other rows"
        rig.run(job.id)

        failed = rig.stores.jobs.find(job.id, tenant)
    assert failed.failure is not None
    assert (failed.failure.code, failed.state) == ("data_changed", JobState.FAILED)
