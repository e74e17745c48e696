"""Fine-tunings as plans, against a worker that computes nothing: what is submitted, told, kept, and gone on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from harness.fake_worker import FakeWorker
from harness.jobs import JobRig, job_rig
from harness.polling import wait_for
from harness.training_jobs import MemoryTools, metrics_of, run_of, spec_of
from twinkle.core.job import JobFailed, JobKind, JobState
from twinkle.core.operation import OperationKind
from twinkle.core.settings import Settings
from twinkle.wire.training import decode_data

SFT, DPO = JobKind.SUPERVISED, JobKind.PREFERENCE
FORWARD, FORWARD_BACKWARD, OPTIM_STEP = (
    OperationKind.FORWARD,
    OperationKind.FORWARD_BACKWARD,
    OperationKind.OPTIM_STEP,
)


@pytest.fixture(scope="module")
def tools() -> MemoryTools:
    return MemoryTools()


@pytest.fixture(scope="module")
def rig(settings: Settings, worker: FakeWorker, tools: MemoryTools) -> Iterator[JobRig]:
    """A runner with the plans that are shipped."""
    with job_rig(settings, tools=tools) as rig:
        yield rig


def checkpoints_of(rig: JobRig, run: str, tenant: str) -> list[str]:
    found, _ = rig.stores.checkpoints.page(tenant, limit=100, offset=0, adapter_id=run)
    return sorted(f"{one.kind.segment}/{one.name}" for one in found)


def test_every_row_is_trained_once_an_epoch_and_a_step_is_told_by_its_metrics(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, SFT, spec_of(epochs=2, batch_size=4, lr=1e-3, schedule="constant", seed=3))

    assert job.failure is None
    assert job.state is JobState.SUCCEEDED
    trained = [claim for claim in worker.executed_of(run_of(job)) if claim.kind is FORWARD_BACKWARD]
    rows = [int(datum.tokens[0]) // 10 for claim in trained for datum in decode_data(worker.payload(claim)).data]
    assert Counter(rows[:10]) == Counter(rows[10:]) == Counter(range(10))
    told = metrics_of(rig, job)
    assert [one["step"] for one in told] == list(range(7))
    assert [one.get("trained_tokens") for one in told[1:]] == [16, 16, 8, 16, 16, 8]
    assert job.progress["done"] == job.progress["total"] == 6
    assert job.result is not None and job.result["trained_tokens"] == 80


def test_the_weights_of_a_step_make_its_loss_a_mean_over_what_trains(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, SFT, spec_of(steps=1, batch_size=4))

    (claim,) = [claim for claim in worker.executed_of(run_of(job)) if claim.kind is FORWARD_BACKWARD]
    weights = [datum.inputs["weights"] for datum in decode_data(worker.payload(claim)).data]
    assert np.concatenate(weights).sum() == pytest.approx(1.0)
    assert np.flatnonzero(weights[0]).tolist() == [2, 3, 4, 5]


def test_numbers_go_on_without_a_gap_whatever_is_looked_at_and_saved(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    spec = spec_of(
        epochs=2, batch_size=3, eval_fraction=0.2, eval_every=2, checkpoint_every=2, sample_every=3, keep_last=1
    )
    job = rig.do(tenant, SFT, {**spec, "samples": []})

    assert job.failure is None
    assert [claim.seq for claim in worker.executed_of(run_of(job))] == list(
        range(1 + max(claim.seq for claim in worker.executed_of(run_of(job))))
    )
    looks = [one for one in metrics_of(rig, job) if "eval_loss" in one]
    assert [one["step"] for one in looks] == [0, 2, 4, 6]
    # The worker says of each operation that one token was right; two rows have four each that train.
    assert [one["eval_accuracy"] for one in looks] == [1 / 8] * 4
    assert job.result is not None and job.result["eval_accuracy"] == 1 / 8


def test_of_the_checkpoints_the_last_ones_and_the_best_stay(rig: JobRig, tenant: str) -> None:
    # The worker's loss is the operation's number: it grows, so the first evaluation is the best.
    spec = spec_of(steps=6, batch_size=2, eval_fraction=0.2, eval_every=1, checkpoint_every=1, keep_last=2)
    job = rig.do(tenant, SFT, spec)

    assert job.failure is None
    names = ["final", "step-000001", "step-000004", "step-000005"]
    assert checkpoints_of(rig, run_of(job), tenant) == [
        f"{segment}/{name}" for segment in ("sampler_weights", "weights") for name in names
    ]
    assert job.result is not None
    assert [one["name"] for one in job.result["checkpoints"]] == ["step-000001", "step-000004", "step-000005"]


def test_evaluations_without_progress_end_a_training_and_nothing_is_submitted_behind_them(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, SFT, spec_of(steps=50, batch_size=2, eval_fraction=0.2, eval_every=1, patience=2))

    assert job.failure is None
    assert job.result is not None
    assert (job.result["step"], job.result["stopped_early"], job.result["best_step"]) == (3, True, 1)
    steps = [claim for claim in worker.executed_of(run_of(job)) if claim.kind is OPTIM_STEP]
    assert len(steps) == 3


def test_preferences_are_held_against_what_the_model_said_before_it_was_trained(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, DPO, spec_of(steps=2, batch_size=5, loss_config={"beta": 0.2}))

    assert job.failure is None
    claims = worker.executed_of(run_of(job))
    asked = [claim for claim in claims if claim.kind is FORWARD]
    assert {claim.seq for claim in asked} == {1}, "the reference comes first"
    first = decode_data(worker.payload(next(claim for claim in claims if claim.kind is FORWARD_BACKWARD)))
    assert (first.loss_fn, first.loss_fn_config, len(first.data)) == ("DPOLoss", {"beta": 0.2}, 10)
    assert all((datum.inputs["ref_logps"] == -1).all() for datum in first.data)
    chosen, rejected = first.data[0], first.data[1]
    assert int(rejected.tokens[0]) - int(chosen.tokens[0]) == 5
    assert metrics_of(rig, job)[1]["margin"] == 0.0


def test_a_preference_without_a_reference_asks_for_none(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    job = rig.do(tenant, DPO, spec_of(steps=1, batch_size=2, loss="SimPOLoss"))

    assert job.failure is None
    assert [claim for claim in worker.executed_of(run_of(job)) if claim.kind is FORWARD] == []


def test_wrong_data_fail_before_anything_is_asked_of_a_device_with_all_that_is_wrong(
    rig: JobRig, tenant: str, tools: MemoryTools, worker: FakeWorker
) -> None:
    before = len(worker.executed)
    errors = [{"line": line, "column": "messages", "reason": "is missing"} for line in (3, 9)]
    tools.refusal = JobFailed("invalid_data", "2 of 10 rows are wrong", details={"errors": errors})
    try:
        job = rig.do(tenant, SFT, spec_of())
    finally:
        tools.refusal = None

    assert job.state is JobState.FAILED
    assert job.failure is not None
    assert (job.failure.code, job.failure.field, job.failure.details) == ("invalid_data", "data", {"errors": errors})
    assert len(worker.executed) == before


def test_a_model_that_is_not_served_fails_by_its_field(rig: JobRig, tenant: str) -> None:
    missing = rig.do(tenant, SFT, {"model": "tinker://nobody:train:0/weights/a", "data": "file-a"})

    assert missing.failure is not None
    assert missing.failure.field == "model"


def test_a_paused_training_goes_on_where_it_was(rig: JobRig, tenant: str, worker: FakeWorker) -> None:
    spec = spec_of(steps=12, batch_size=2, eval_fraction=0.2, checkpoint_every=4, seed=5)
    calm = rig.do(tenant, SFT, spec)
    job = rig.submit(tenant, SFT, spec)
    with worker.paused():
        running = rig.start(job.id)
        wait_for(lambda: rig.stores.jobs.find(job.id, tenant).phase == "training", what="the training under way")
        rig.stores.jobs.request_pause(job.id, tenant)
    running.join()
    assert rig.stores.jobs.find(job.id, tenant).state is JobState.PAUSED
    rig.stores.jobs.request_resume(job.id, tenant)
    rig.run(job.id)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert ended.failure is None
    assert metrics_of(rig, ended) == metrics_of(rig, calm)
    done = [[(claim.seq, claim.kind) for claim in worker.executed_of(run_of(one))] for one in (calm, ended)]
    assert done[0] == done[1]


def test_a_cancelled_training_leaves_a_checkpoint_and_a_retry_goes_on_from_it(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.submit(tenant, SFT, spec_of(steps=40, batch_size=2))
    with worker.paused():
        running = rig.start(job.id)
        wait_for(lambda: rig.stores.jobs.find(job.id, tenant).phase == "training", what="the training under way")
        rig.stores.jobs.request_cancel(job.id, tenant)
    running.join()

    cancelled = rig.stores.jobs.find(job.id, tenant)
    assert cancelled.state is JobState.CANCELLED
    assert cancelled.result is not None
    step = cancelled.result["step"]
    assert 0 < step < 40
    assert {"weights/cancelled", "sampler_weights/cancelled"} <= set(checkpoints_of(rig, run_of(cancelled), tenant))
    applied = [claim for claim in worker.executed_of(run_of(cancelled)) if claim.kind is OPTIM_STEP]
    assert len(applied) == step, "what the checkpoint holds is what it says"

    rig.stores.jobs.request_retry(job.id, tenant)
    rig.run(job.id)
    ended = rig.stores.jobs.find(job.id, tenant)

    assert ended.failure is None
    assert ended.state is JobState.SUCCEEDED
    assert run_of(ended) != run_of(cancelled)
    rest = [claim for claim in worker.executed_of(run_of(ended)) if claim.kind is OPTIM_STEP]
    assert len(rest) == 40 - step
    assert [one["step"] for one in metrics_of(rig, ended)] == list(range(41))


def test_the_time_in_line_is_told_apart_from_that_of_computing(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, SFT, spec_of(steps=3, batch_size=2))

    queue_s, compute_s = job.progress["queue_s"], job.progress["compute_s"]
    assert isinstance(queue_s, float) and isinstance(compute_s, float)
    assert job.finished_at is not None and job.started_at is not None
    assert 0 < queue_s + compute_s <= job.finished_at - job.started_at + 0.002
