"""Whose jobs begin next: tenants take turns, whoever came first or sent most."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.job_bench import JobBench
from harness.journal import Bench
from twinkle.core.job import JobState
from twinkle.core.lease import ProcessIdentity


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


def owners(jobs: JobBench, ids: list[str]) -> list[str]:
    tenants = {tenant: {job.id for job in jobs.jobs.page(tenant, limit=1000)} for tenant in ("t0", "t1")}
    return [next(tenant for tenant, own in tenants.items() if one in own) for one in ids]


def test_a_tenant_with_one_job_does_not_wait_behind_another_ones_hundred(jobs: JobBench) -> None:
    jobs.submit(*(jobs.new() for _ in range(100)))
    (one,) = jobs.submit(jobs.new(tenant="t1"))

    assert one.id in jobs.ready(limit=2)


def test_tenants_with_equal_weights_have_equally_many_under_way(jobs: JobBench) -> None:
    jobs.submit(*(jobs.new() for _ in range(100)))
    jobs.submit(*(jobs.new(tenant="t1") for _ in range(20)))

    assert Counter(owners(jobs, jobs.ready(limit=20))) == {"t0": 10, "t1": 10}


def test_places_are_given_by_weight(jobs: JobBench) -> None:
    jobs.bench.stores.tenants.set("t0", weight=3.0, limits={})
    jobs.submit(*(jobs.new() for _ in range(100)))
    jobs.submit(*(jobs.new(tenant="t1") for _ in range(100)))

    assert Counter(owners(jobs, jobs.ready(limit=40))) == {"t0": 30, "t1": 10}


def test_whoever_has_jobs_running_waits_for_whoever_has_none(jobs: JobBench) -> None:
    own = jobs.submit(*(jobs.new() for _ in range(4)))
    jobs.ready(limit=2)
    for job in own[:2]:
        jobs.begin(job.id)
    jobs.submit(*(jobs.new(tenant="t1") for _ in range(4)))

    assert owners(jobs, jobs.ready(limit=3)) == ["t1", "t1", "t0"]


def test_a_tenants_urgent_jobs_go_first_then_the_oldest(jobs: JobBench) -> None:
    plain, also, urgent = jobs.submit(jobs.new(), jobs.new(), jobs.new(nice=0))

    assert jobs.ready() == [urgent.id, plain.id, also.id]


def test_no_more_of_a_tenants_jobs_run_at_once_than_its_limit_lets(jobs: JobBench) -> None:
    jobs.bench.stores.tenants.set("t0", limits={"max_running_jobs": 2})
    own = jobs.submit(*(jobs.new() for _ in range(5)))
    others = jobs.submit(*(jobs.new(tenant="t1") for _ in range(5)))

    assert sorted(jobs.ready()) == sorted(job.id for job in [*own[:2], *others])
    jobs.run(own[0].id)
    assert jobs.ready() == [own[2].id]


def test_what_was_handed_out_and_not_begun_keeps_its_place_until_it_is_handed_out_again(jobs: JobBench) -> None:
    first, second = jobs.submit(jobs.new(), jobs.new())

    assert jobs.ready(limit=1) == [first.id]
    assert jobs.ready(limit=1) == []
    jobs.bench.clock.move(61)
    assert jobs.ready(limit=2) == [first.id, second.id]


def test_a_suspended_tenants_jobs_wait_and_one_that_runs_is_held_at_its_next_safe_point(jobs: JobBench) -> None:
    running, waiting = jobs.submit(jobs.new(), jobs.new())
    claim = jobs.begin(running.id)
    jobs.bench.stores.tenants.suspend("t0", "a reason")

    assert jobs.bench.stores.running_jobs.beat(claim).pause
    held = jobs.bench.stores.running_jobs.give_back(claim, JobState.PAUSED, reason="paused")
    assert held.state is JobState.QUEUED
    assert jobs.ready() == []
    assert jobs.bench.stores.running_jobs.claim(waiting.id, ProcessIdentity.current(), lease_s=60) is None

    jobs.bench.stores.tenants.resume("t0")

    assert sorted(jobs.ready()) == sorted([running.id, waiting.id])
    assert not jobs.bench.stores.running_jobs.beat(jobs.begin(running.id)).pause
