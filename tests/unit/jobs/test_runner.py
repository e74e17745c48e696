"""Jobs from their submission to their end, through the API in process and a worker that computes nothing."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from harness.fake_worker import FakeWorker
from harness.job_plans import TEST_PLANS
from harness.jobs import JobRig, job_rig
from harness.polling import PATIENCE_S, wait_for
from twinkle.core.errors import NotFound, StatementFailed, StorageUnavailable
from twinkle.core.job import Job, JobClaim, JobKind, JobSignals, JobState
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import COMPLETIONS, ChannelListener, CompletionPublisher
from twinkle.storage.jobs.running import RunningJobs


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


def test_whoever_follows_a_job_is_told_at_once_when_something_has_happened(
    rig: JobRig, settings: Settings, tenant: str
) -> None:
    heard: queue.Queue[list[str]] = queue.Queue()
    listener = ChannelListener(settings.redis_url.get_secret_value(), COMPLETIONS, heard.put)
    listener.start()
    publisher = CompletionPublisher(settings.redis_url.get_secret_value())
    wait_for(lambda: publisher.publish(["there?"]) or not heard.empty(), what="the listener has subscribed")

    job = rig.do(tenant, JobKind.SUPERVISED, {"steps": 3})

    wait_for(lambda: sum(ids == [job.id] for ids in list(heard.queue)) == 5, what="begun, three steps, ended")
    listener.stop()


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


def test_of_two_runners_on_one_job_the_first_writes_nothing_more_and_nothing_is_done_twice(
    rig: JobRig, settings: Settings, tenant: str, worker: FakeWorker
) -> None:
    calm = rig.do(tenant, JobKind.SUPERVISED, {"steps": 4}, seed=7)
    job = rig.submit(tenant, JobKind.SUPERVISED, {"steps": 4}, seed=7)
    with job_rig(settings, plans=TEST_PLANS, lease_s=0.3) as late, worker.paused():
        first = late.start(job.id)
        wait_for(lambda: rig.stores.jobs.find(job.id, tenant).state is JobState.RUNNING, what="the first runner")
        # As if it had been frozen for longer than its lease, while it did not know.
        take_over = "UPDATE job SET state = 'retrying', owner = NULL, not_before = 0 WHERE id = ?"
        with rig.stores.database.transaction() as transaction:
            transaction.execute(take_over, (job.id,))
        second = rig.start(job.id)
        first.join()
        assert rig.stores.jobs.find(job.id, tenant).state is JobState.RUNNING
    second.join()

    ended = rig.stores.jobs.find(job.id, tenant)
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
    lanes = [
        str(one.result["checkpoint"]).removeprefix("tinker://").split("/")[0] for one in (calm, ended) if one.result
    ]
    done = [[(claim.seq, claim.kind) for claim in worker.executed_of(lane)] for lane in lanes]
    assert done[0] == done[1]


def test_a_runner_that_is_stopped_gives_its_jobs_back_at_once_and_the_next_one_goes_on(
    rig: JobRig, settings: Settings, tenant: str, worker: FakeWorker
) -> None:
    jobs = [rig.submit(tenant, JobKind.SUPERVISED, {"steps": 3}) for _ in range(3)]
    with job_rig(settings, plans=TEST_PLANS) as stopped:
        with worker.paused():
            running = [stopped.start(job.id) for job in jobs]
            wait_for(
                lambda: all(rig.stores.jobs.find(job.id, tenant).state is JobState.RUNNING for job in jobs),
                what="all jobs under way",
            )
            stopped.stop()
        for thread in running:
            thread.join()
        assert stopped.run(jobs[0].id) is None, "it takes no more"
    given_back = [rig.stores.jobs.find(job.id, tenant).state for job in jobs]
    ended = [rig.run(job.id) for job in jobs]

    assert given_back == [JobState.QUEUED] * 3
    assert [(job.state, job.attempt) for job in ended if job] == [(JobState.SUCCEEDED, 1)] * 3


def test_a_runner_that_is_stopped_while_the_journal_is_away_ends_and_leaves_its_jobs_to_the_next(
    rig: JobRig, settings: Settings, tenant: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back, is_away = RunningJobs.give_back, threading.Event()
    is_away.set()

    def away(running: RunningJobs, claim: JobClaim, state: JobState, **how: Any) -> Job:
        if is_away.is_set():
            raise StorageUnavailable("the database is away")
        return give_back(running, claim, state, **how)

    monkeypatch.setattr(RunningJobs, "give_back", away)
    job = rig.submit(tenant, JobKind.SUPERVISED, {"steps": 3})
    with job_rig(settings, plans=TEST_PLANS, lease_s=1.0) as stopped:
        with worker.paused():
            running = stopped.start(job.id)
            wait_for(lambda: rig.stores.jobs.find(job.id, tenant).state is JobState.RUNNING, what="the job under way")
            ending = threading.Thread(target=stopped.stop, daemon=True)
            ending.start()
            ending.join(PATIENCE_S)
            has_ended = not ending.is_alive()
            is_away.clear()
        running.join()
    wait_for(lambda: rig.run(job.id), what="the lease's end, and the job's")

    assert has_ended
    assert rig.stores.jobs.find(job.id, tenant).state is JobState.SUCCEEDED


def test_a_lease_is_renewed_again_after_a_beat_that_failed_of_what_nobody_thought_of(
    settings: Settings, tenant: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[JobSignals] = []
    fails = iter([StatementFailed("refused")])
    beat = RunningJobs.beat

    def failing_once(running: RunningJobs, claim: JobClaim) -> JobSignals:
        for error in fails:
            raise error
        beats.append(beat(running, claim))
        return beats[-1]

    monkeypatch.setattr(RunningJobs, "beat", failing_once)
    with job_rig(settings, plans=TEST_PLANS, lease_s=3.0) as rig:
        job = rig.submit(tenant, JobKind.SUPERVISED, {"steps": 2})
        with worker.paused():
            running = rig.start(job.id)
            wait_for(lambda: len(beats) >= 2, what="beats after the one that failed")
        running.join()
        ended = rig.stores.jobs.find(job.id, tenant)

    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
