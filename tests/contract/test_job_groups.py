"""Sweeps and flows in the journal: made in one transaction, ended with their members, told as a whole."""

from __future__ import annotations

import pytest

from harness.job_bench import JobBench
from harness.journal import Bench
from twinkle.core.errors import Conflict, LimitReached
from twinkle.core.job import Dependency, JobKind, JobState


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


def members_of(jobs: JobBench, group: str) -> dict[str, JobState]:
    return {member.id.removeprefix(f"{group}~"): member.state for member in jobs.jobs.members(group, "t0")}


def test_a_sweep_waits_for_its_members_runs_while_they_do_and_is_ready_with_the_last(jobs: JobBench) -> None:
    sweep = jobs.sweep(2)

    assert (sweep.state, sweep.progress) == (JobState.WAITING, {"done": 0, "total": 2, "unit": "jobs"})
    first, second = jobs.ready()
    assert (first, second) == (f"{sweep.id}~0000", f"{sweep.id}~0001")
    jobs.run(first)
    assert jobs.state(sweep.id) is JobState.RUNNING
    assert jobs.jobs.find(sweep.id, "t0").progress["done"] == 1
    jobs.run(second, JobState.FAILED)
    assert jobs.ready() == [sweep.id]


def test_a_list_by_state_finds_sweeps_and_flows_in_the_state_that_it_shows(jobs: JobBench) -> None:
    begun, flow = jobs.sweep(2), jobs.flow(first={})
    jobs.begin(f"{begun.id}~0000")

    def listed(*states: JobState) -> set[str]:
        return {job.id for job in jobs.jobs.page("t0", limit=100, states=states)}

    assert listed(JobState.RUNNING) == {begun.id, f"{begun.id}~0000"}
    assert listed(JobState.WAITING) == {flow.id}
    assert listed(JobState.WAITING, JobState.RUNNING) == {begun.id, f"{begun.id}~0000", flow.id}
    assert all(job.state is JobState.RUNNING for job in jobs.jobs.page("t0", limit=100, states=[JobState.RUNNING]))


def test_a_thousand_members_are_one_request_and_one_transaction(jobs: JobBench) -> None:
    sweep = jobs.sweep(1000)

    assert jobs.jobs.find(sweep.id, "t0").progress["total"] == 1000
    assert list(members_of(jobs, sweep.id)) == [f"{number:04d}" for number in range(1000)]


def test_a_sweep_sent_again_is_the_same_sweep_and_no_member_comes_twice(jobs: JobBench) -> None:
    first = jobs.sweep(3, client_id="mine")
    again = jobs.sweep(3, client_id="mine")

    assert again.id == first.id
    assert len(jobs.jobs.page("t0", limit=100)) == 4
    with pytest.raises(Conflict):
        jobs.sweep(4, client_id="mine")


def test_no_more_members_than_that_run_at_once_and_others_pass_by(jobs: JobBench) -> None:
    sweep = jobs.sweep(5, at_once=2)
    (other,) = jobs.submit(jobs.new())

    assert jobs.ready() == [f"{sweep.id}~0000", f"{sweep.id}~0001", other.id]
    jobs.run(f"{sweep.id}~0000")
    assert jobs.ready() == [f"{sweep.id}~0002"]
    assert jobs.ready() == []


def test_a_cancelled_sweep_cancels_its_members_and_ends_behind_those_that_put_something_down(jobs: JobBench) -> None:
    sweep = jobs.sweep(3)
    jobs.ready()
    claim = jobs.begin(f"{sweep.id}~0000")

    told = jobs.jobs.request_cancel(sweep.id, "t0")

    assert told.cancel_requested and told.state is JobState.RUNNING
    assert members_of(jobs, sweep.id) == {
        "0000": JobState.RUNNING,
        "0001": JobState.CANCELLED,
        "0002": JobState.CANCELLED,
    }
    assert jobs.running.beat(claim).cancel
    assert jobs.ready() == []
    jobs.end(claim, JobState.CANCELLED)
    assert jobs.ready() == [sweep.id]


def test_a_paused_sweep_holds_all_of_it_and_goes_on_as_a_whole(jobs: JobBench) -> None:
    sweep = jobs.sweep(3)
    jobs.ready()
    claim = jobs.begin(f"{sweep.id}~0000")

    assert jobs.jobs.request_pause(sweep.id, "t0").state is JobState.PAUSED
    assert jobs.running.beat(claim).pause
    jobs.running.give_back(claim, JobState.PAUSED, reason="paused")
    assert jobs.ready() == []
    assert set(members_of(jobs, sweep.id).values()) == {JobState.PAUSED}

    assert jobs.jobs.request_resume(sweep.id, "t0").state is JobState.RUNNING
    assert jobs.ready() == [f"{sweep.id}~000{number}" for number in range(3)]


def test_a_retried_sweep_tries_again_what_failed_and_nothing_else(jobs: JobBench) -> None:
    sweep = jobs.sweep(2)
    jobs.ready()
    jobs.run(f"{sweep.id}~0000")
    jobs.run(f"{sweep.id}~0001", JobState.FAILED)
    jobs.ready()
    jobs.run(sweep.id)

    jobs.jobs.request_retry(sweep.id, "t0")

    assert members_of(jobs, sweep.id) == {"0000": JobState.SUCCEEDED, "0001": JobState.RETRYING}
    assert jobs.ready() == [f"{sweep.id}~0001"]
    jobs.run(f"{sweep.id}~0001")
    assert jobs.ready() == [sweep.id]
    jobs.run(sweep.id)
    with pytest.raises(Conflict, match="only one that failed or was cancelled"):
        jobs.jobs.request_retry(sweep.id, "t0")


def test_a_job_of_a_flow_waits_for_what_it_needs_and_goes_without_it_where_any_end_will_do(jobs: JobBench) -> None:
    flow = jobs.flow(
        train={}, good={"after": {"train": "ok"}}, always={"after": {"train": "any"}}, last={"after": {"good": "ok"}}
    )

    assert jobs.ready() == [f"{flow.id}~train"]
    jobs.run(f"{flow.id}~train", JobState.FAILED)
    assert jobs.ready() == [f"{flow.id}~always"]
    good = jobs.jobs.find(f"{flow.id}~good", "t0")
    assert good.state is JobState.CANCELLED
    assert good.failure is not None and good.failure.code == "dependency"
    assert jobs.state(f"{flow.id}~last") is JobState.CANCELLED
    jobs.run(f"{flow.id}~always")
    assert jobs.ready() == [flow.id]


def test_a_retried_flow_goes_on_in_its_order(jobs: JobBench) -> None:
    flow = jobs.flow(train={}, test={"after": {"train": "ok"}})
    jobs.ready()
    jobs.run(f"{flow.id}~train", JobState.FAILED)
    jobs.ready()
    jobs.run(flow.id, JobState.FAILED)

    jobs.jobs.request_retry(flow.id, "t0")

    assert jobs.ready() == [f"{flow.id}~train"]
    jobs.run(f"{flow.id}~train")
    assert jobs.ready() == [f"{flow.id}~test"]
    jobs.run(f"{flow.id}~test")
    assert jobs.ready() == [flow.id]


def test_a_sweep_within_a_flow_is_cancelled_with_it(jobs: JobBench) -> None:
    spec = {"template": {"kind": "sft", "spec": {"model": "base", "data": "file-1"}}, "parameters": {"seed": [1, 2]}}
    flow = jobs.flow(
        search={"kind": "sweep", "spec": spec},
        more={"spec": {"model": "${search.best.checkpoint}", "data": "file-1"}},
    )
    assert jobs.ready() == [f"{flow.id}~search~0000", f"{flow.id}~search~0001"]

    jobs.jobs.request_cancel(flow.id, "t0")

    assert members_of(jobs, f"{flow.id}~search") == {"0000": JobState.CANCELLED, "0001": JobState.CANCELLED}
    assert jobs.ready() == [f"{flow.id}~search"]
    jobs.run(f"{flow.id}~search", JobState.CANCELLED)
    assert jobs.ready() == [flow.id]


def test_a_job_paused_while_it_waits_ends_as_it_would_have_when_it_goes_on(jobs: JobBench) -> None:
    (first,) = jobs.submit(jobs.new())
    (second,) = jobs.submit(jobs.new(after=(Dependency(job=first.id),)))
    jobs.jobs.request_pause(second.id, "t0")
    jobs.ready()
    jobs.run(first.id, JobState.FAILED)

    jobs.jobs.request_resume(second.id, "t0")

    assert jobs.ready() == []
    assert jobs.state(second.id) is JobState.CANCELLED


def test_jobs_beyond_the_limit_are_refused_all_together_with_the_numbers(jobs: JobBench) -> None:
    jobs.bench.stores.tenants.set("t0", limits={"max_jobs": 4})
    jobs.submit(jobs.new(), jobs.new())

    with pytest.raises(
        LimitReached, match=r"you have 2 jobs that have not ended, and 4 may be \(max_jobs\); .* 3 more"
    ):
        jobs.sweep(2)

    assert len(jobs.jobs.page("t0", limit=100)) == 2
    assert jobs.sweep(1).kind is JobKind.SWEEP
    jobs.submit(jobs.new(tenant="t1"))


def test_what_was_sent_before_is_no_more_than_there_is_already(jobs: JobBench) -> None:
    jobs.bench.stores.tenants.set("t0", limits={"max_jobs": 3})
    first = jobs.sweep(2, client_id="mine")

    assert jobs.sweep(2, client_id="mine").id == first.id
