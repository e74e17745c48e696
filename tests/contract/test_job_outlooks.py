"""Why a job waits, in a closed list of words, and how many are before it."""

from __future__ import annotations

import pytest

from harness.job_bench import JobBench
from harness.journal import Bench
from twinkle.core.job import Dependency, JobFailure, JobState
from twinkle.storage.jobs.standing import JobOutlook, JobOutlooks, JobWait, JobWaitReason


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


def outlook(jobs: JobBench, job: str, tenant: str = "t0") -> JobOutlook:
    return jobs.bench.stores.job_outlooks.of(job, tenant)


def reason(jobs: JobBench, job: str) -> JobWaitReason | None:
    wait = outlook(jobs, job).wait
    return None if wait is None else wait.reason


def test_every_reason_is_told_by_its_word(jobs: JobBench) -> None:
    jobs.bench.stores.tenants.set("t0", limits={"max_running_jobs": 2})
    first, held, failing = jobs.submit(jobs.new(), jobs.new(), jobs.new(max_attempts=9))
    (later,) = jobs.submit(jobs.new(after=(Dependency(job=first.id),)))
    jobs.jobs.request_pause(held.id, "t0")
    claim = jobs.begin(failing.id)
    jobs.running.fail_attempt(claim, JobFailure(code="x", message="x", is_transient=True), pause_s=lambda _: 30.0)
    jobs.begin(first.id)
    sweep = jobs.sweep(3, at_once=1)
    jobs.begin(f"{sweep.id}~0000")

    assert reason(jobs, first.id) is None
    assert reason(jobs, held.id) is JobWaitReason.PAUSED
    waits = outlook(jobs, later.id).wait
    assert waits is not None
    assert (waits.reason, waits.waits_for) == (JobWaitReason.DEPENDENCY, first.id)
    waits = outlook(jobs, failing.id).wait
    assert waits is not None
    assert (waits.reason, waits.until) == (
        JobWaitReason.RETRY_BACKOFF,
        jobs.jobs.find(failing.id, "t0").not_before,
    )
    assert reason(jobs, f"{sweep.id}~0001") is JobWaitReason.AT_ONCE
    (full,) = jobs.submit(jobs.new())
    assert reason(jobs, full.id) is JobWaitReason.MAX_RUNNING_JOBS
    jobs.bench.stores.tenants.set("t0", limits={"max_running_jobs": 9})
    assert reason(jobs, full.id) is JobWaitReason.POSITION


def test_the_position_counts_own_jobs_and_the_turns_of_others(jobs: JobBench) -> None:
    own = jobs.submit(*(jobs.new() for _ in range(4)))
    jobs.submit(*(jobs.new(tenant="t1") for _ in range(50)))

    waits = outlook(jobs, own[3].id).wait

    assert waits is not None
    assert (waits.reason, waits.num_own_before, waits.num_before) == (JobWaitReason.POSITION, 3, 3 + 4)
    order = jobs.ready(limit=100)
    assert order.index(own[3].id) <= waits.num_before


def test_no_more_places_are_counted_than_so_many_of_ones_own_and_of_others(jobs: JobBench) -> None:
    own = jobs.submit(*(jobs.new() for _ in range(6)))
    jobs.submit(*(jobs.new(tenant="t1") for _ in range(4)))
    near = JobOutlooks(jobs.bench.database, jobs.bench.clock, far=5)

    def place(number: int) -> tuple[int | None, int | None, bool]:
        wait = near.of(own[number].id, "t0").wait
        assert wait is not None and wait.reason is JobWaitReason.POSITION
        return wait.num_before, wait.num_own_before, wait.is_exact

    assert [place(0), place(1)] == [(1, 0, True), (3, 1, True)]
    assert place(2) == (5, 2, False), "of the other one's three turns the last is one more than is counted"
    assert place(5) == (5, 5, False)
    whole = JobWait(reason=JobWaitReason.POSITION, num_before=5 + 4, num_own_before=5)
    assert outlook(jobs, own[5].id).wait == whole


def test_the_end_is_reckoned_from_what_jobs_of_the_kind_took(jobs: JobBench) -> None:
    done, running, queued = jobs.submit(jobs.new(), jobs.new(), jobs.new())
    assert outlook(jobs, queued.id).ends_at is None
    claim = jobs.begin(done.id)
    jobs.bench.clock.move(100.0)
    jobs.end(claim, JobState.SUCCEEDED)
    jobs.begin(running.id)
    jobs.bench.clock.move(40.0)

    now = jobs.bench.clock.now()
    assert outlook(jobs, running.id).ends_at == pytest.approx(now + 60.0)
    assert outlook(jobs, queued.id).ends_at == pytest.approx(now + 100.0)


def test_nothing_is_told_of_another_tenants_job_nor_of_one_that_has_ended(jobs: JobBench) -> None:
    (job,) = jobs.submit(jobs.new())

    assert outlook(jobs, job.id, "t1") == JobOutlook(wait=None, ends_at=None)
    jobs.run(job.id)
    assert outlook(jobs, job.id) == JobOutlook(wait=None, ends_at=None)
