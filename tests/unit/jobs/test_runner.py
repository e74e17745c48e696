"""Jobs from their submission to their end, through the API in process and a worker that computes nothing."""

from __future__ import annotations

import pytest

from harness.fake_worker import FakeWorker
from harness.jobs import JobRig
from harness.polling import wait_for
from twinkle.core.errors import NotFound
from twinkle.core.job import JobKind, JobState


def test_a_job_trains_saves_and_says_how_far_it_is(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, JobKind.SUPERVISED, {"steps": 3}, name="mine")

    assert job.failure is None
    assert job.state is JobState.SUCCEEDED
    assert job.progress == {"done": 3, "total": 3, "unit": "steps"}
    assert job.phase == "training"
    assert job.attempt == 1
    assert job.result is not None and job.result["checkpoint"].endswith("/weights/final")
    kinds = [(event.kind, event.message) for event in rig.stores.jobs.events(job.id, tenant)]
    assert kinds == [
        ("status", "submitted"),
        ("attempt", "attempt 1 begins"),
        ("metrics", "step 0"),
        ("metrics", "step 1"),
        ("metrics", "step 2"),
        ("status", "succeeded"),
    ]


def test_what_a_job_does_is_its_tenants_and_waits_behind_what_is_interactive(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    job = rig.do(tenant, JobKind.SUPERVISED, {"steps": 1})

    assert job.result is not None
    lane = job.result["checkpoint"].removeprefix("tinker://").split("/")[0]
    assert {claim.tenant for claim in worker.executed_of(lane)} == {tenant}
    rows = rig.stores.database.read("SELECT nice FROM lane WHERE id = ?", (lane,))
    assert [abs(row.nice) for row in rows] == [50]
    sessions = rig.stores.database.read("SELECT tenant, id AS session FROM session WHERE job = ?", (job.id,))
    assert [(row.tenant, lane.startswith(row.session)) for row in sessions] == [(tenant, True)]


def test_a_job_given_back_in_the_middle_goes_on_and_does_nothing_twice(
    rig: JobRig, tenant: str, worker: FakeWorker
) -> None:
    calm = rig.do(tenant, JobKind.SUPERVISED, {"steps": 4}, seed=7)
    paused = rig.submit(tenant, JobKind.SUPERVISED, {"steps": 4}, seed=7)
    rig.stores.jobs.request_pause(paused.id, tenant)
    assert rig.run(paused.id) is None, "it is paused before it began"
    rig.stores.jobs.request_resume(paused.id, tenant)
    with worker.paused():
        running = rig.start(paused.id)
        wait_for(lambda: rig.stores.jobs.find(paused.id, tenant).state is JobState.RUNNING, what="the job under way")
        rig.stores.jobs.request_pause(paused.id, tenant)
    running.join()
    held = rig.stores.jobs.find(paused.id, tenant)
    rig.stores.jobs.request_resume(paused.id, tenant)
    ended = rig.run(paused.id)

    assert held.state is JobState.PAUSED
    assert 0 < held.progress["done"] < 4
    assert ended is not None and ended.state is JobState.SUCCEEDED
    assert ended.attempt == 1, "a pause uses up no attempt"
    assert calm.result is not None and ended.result is not None
    lanes = [
        str(job.result["checkpoint"]).removeprefix("tinker://").split("/")[0] for job in (calm, ended) if job.result
    ]
    done = [[(claim.seq, claim.kind) for claim in worker.executed_of(lane)] for lane in lanes]
    assert done[0] == done[1]


def test_a_reason_that_may_pass_is_tried_again_and_each_attempt_can_be_seen(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, JobKind.CHECK, {"how": "transient", "succeeds_at": 3})
    assert job.state is JobState.RETRYING
    rig.run(job.id)
    ended = rig.run(job.id)

    assert ended is not None
    assert (ended.state, ended.result) == (JobState.SUCCEEDED, {"attempt": 3})
    attempts = rig.stores.jobs.attempts(job.id, tenant)
    assert [(one.attempt, one.outcome, one.reason) for one in attempts] == [
        (1, "failed", "as it was asked to"),
        (2, "failed", "as it was asked to"),
        (3, "succeeded", None),
    ]


@pytest.mark.parametrize(("how", "num_attempts"), [("for good", 1), ("transient", 3), ("unforeseen", 3)])
def test_a_job_fails_for_good_at_once_and_for_what_may_pass_after_its_attempts(
    rig: JobRig, tenant: str, how: str, num_attempts: int
) -> None:
    job = rig.submit(tenant, JobKind.CHECK, {"how": how})
    while not rig.stores.jobs.find(job.id, tenant).state.is_final:
        rig.run(job.id)

    ended = rig.stores.jobs.find(job.id, tenant)
    assert (ended.state, ended.attempt) == (JobState.FAILED, num_attempts)
    assert ended.failure is not None
    assert "secret" not in ended.failure.message


def test_a_job_that_rests_leaves_its_place_and_uses_up_no_attempt(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, JobKind.CHECK, {"how": "rest"})
    ended = rig.run(job.id)

    assert job.state is JobState.QUEUED
    assert ended is not None
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)


def test_a_cancelled_job_leaves_a_checkpoint_even_if_it_was_paused(rig: JobRig, tenant: str) -> None:
    job = rig.submit(tenant, JobKind.SUPERVISED, {"steps": 400})
    running = rig.start(job.id)
    wait_for(lambda: rig.stores.jobs.find(job.id, tenant).progress, what="a step")
    rig.stores.jobs.request_pause(job.id, tenant)
    running.join()
    assert rig.stores.jobs.find(job.id, tenant).state is JobState.PAUSED

    cancelling = rig.stores.jobs.request_cancel(job.id, tenant)
    ended = rig.run(job.id)

    assert (cancelling.state, cancelling.cancel_requested) == (JobState.QUEUED, True)
    assert ended is not None and ended.result is not None
    assert ended.state is JobState.CANCELLED
    assert ended.result["checkpoint"].endswith("/weights/cancelled")


def test_a_spec_that_is_wrong_is_refused_before_anything_is_done(rig: JobRig, tenant: str) -> None:
    job = rig.do(tenant, JobKind.SUPERVISED, {"stepz": 3})

    assert job.failure is not None
    assert (job.state, job.failure.code) == (JobState.FAILED, "invalid_spec")


def test_nobody_sees_another_tenants_job(rig: JobRig, tenant: str) -> None:
    job = rig.submit(tenant, JobKind.CHECK, {"how": "for good"})

    for ask in (
        rig.stores.jobs.find,
        rig.stores.jobs.events,
        rig.stores.jobs.attempts,
        rig.stores.jobs.request_cancel,
        rig.stores.jobs.request_pause,
        rig.stores.jobs.request_resume,
        rig.stores.jobs.request_retry,
    ):
        with pytest.raises(NotFound):
            ask(job.id, "somebody else")
    assert rig.stores.jobs.page("somebody else", limit=10) == []
