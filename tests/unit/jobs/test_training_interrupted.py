"""Fine-tunings that are cut off, fail in the middle, or are run by two at once: what comes of them is the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.cut_jobs import Cuts
from harness.fake_worker import FakeWorker
from harness.jobs import JobRig, job_rig
from harness.training_jobs import MemoryTools, done_in, metrics_of, run_of, spec_of, told
from twinkle.core.job import JobKind, JobState
from twinkle.core.operation import Claim, Failure, FailureCategory, OperationKind
from twinkle.core.settings import Settings
from twinkle.jobs.training.plan import PreferencePlan, SupervisedPlan

SFT, DPO = JobKind.SUPERVISED, JobKind.PREFERENCE
SPEC = {"steps": 7, "batch_size": 3, "eval_fraction": 0.2, "eval_every": 2, "checkpoint_every": 3, "seed": 11}
CUTS = Cuts()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker) -> Iterator[JobRig]:
    with job_rig(
        settings, plans={SFT: CUTS.into(SupervisedPlan), DPO: CUTS.into(PreferencePlan)}, tools=MemoryTools()
    ) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_left(worker: FakeWorker) -> Iterator[None]:
    yield
    CUTS.at = worker.failing = None


@pytest.mark.parametrize("kind", [SFT, DPO])
def test_wherever_an_attempt_is_cut_off_the_next_one_goes_on_and_nothing_is_done_twice(
    rig: JobRig, tenant: str, worker: FakeWorker, kind: JobKind
) -> None:
    calm = rig.do(tenant, kind, spec_of(**SPEC))
    assert calm.failure is None
    cuts = [(number, is_written) for number in range(1, 12) for is_written in (False, True)]
    if rig.stores.database.is_postgres or kind is DPO:
        # The plan is the same one, and so is what it goes on from: some places show that the rest is, too.
        cuts = cuts[1::5]
    num_cut = 0
    for place in cuts:
        job = rig.submit(tenant, kind, spec_of(**SPEC), max_attempts=5)
        CUTS.at = place
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
    assert num_cut >= 0.6 * len(cuts), "otherwise little was cut off"


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


def test_rows_of_a_failed_operation_are_named_by_their_lines_in_the_file(
    settings: Settings, tenant: str, worker: FakeWorker
) -> None:
    tools = MemoryTools()
    tools.first_line = 3
    worker.failing = lambda claim: (
        Failure(message="a gradient is not finite", category=FailureCategory.USER, code="user")
        if claim.kind is OperationKind.FORWARD_BACKWARD
        else None
    )

    with job_rig(settings, tools=tools) as rig:
        job = rig.do(tenant, SFT, spec_of(steps=1, batch_size=2, seed=1))

    assert job.failure is not None
    rows = job.failure.details["rows"]
    assert f"in it were lines {', '.join(str(row + 3) for row in rows)} of file-a" in job.failure.message


def test_changed_data_are_not_trained_on_in_the_middle(settings: Settings, worker: FakeWorker, tenant: str) -> None:
    tools = MemoryTools()
    with job_rig(settings, plans={SFT: CUTS.into(SupervisedPlan)}, tools=tools) as rig:
        job = rig.submit(tenant, SFT, spec_of(**SPEC), max_attempts=5)
        CUTS.at = (4, True)
        rig.run(job.id)
        tools.digest = "other rows"
        rig.run(job.id)

        failed = rig.stores.jobs.find(job.id, tenant)
    assert failed.failure is not None
    assert (failed.failure.code, failed.state) == ("data_changed", JobState.FAILED)
