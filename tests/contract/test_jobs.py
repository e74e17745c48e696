"""Jobs in the journal: taken on once, run by one runner at a time, paused, ended, and never stuck."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from harness.job_life import LASTING, LEASE_S, PAUSE_S, JobBench, new_job
from harness.journal import Bench, identity
from twinkle.core.errors import Conflict, InvalidInput, NotFound, StorageUnavailable
from twinkle.core.job import JobEvent, JobFailed, JobLost, JobSignals, JobState


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


def test_the_same_id_with_the_same_body_is_the_same_job_and_with_another_is_refused(jobs: JobBench) -> None:
    first = jobs.submit("a", client_id="mine")

    assert jobs.jobs.create(replace(new_job("b", client_id="mine"), digest=first.digest)).id == "a"
    with pytest.raises(Conflict, match="mine"):
        jobs.submit("c", client_id="mine")
    assert jobs.submit("d", client_id="mine", tenant="t1").id == "d"
    assert [job.id for job in jobs.jobs.page("t0", limit=10)] == ["a"]


def test_of_many_jobs_all_are_taken_on_in_their_order_or_none(jobs: JobBench) -> None:
    jobs.submit("there", client_id="there")

    with pytest.raises(NotFound):
        jobs.jobs.create_many([new_job("x"), new_job("y", needs={"nothing": "ok"})])
    with pytest.raises(Conflict):
        jobs.jobs.create_many([new_job("x"), new_job("y", client_id="there")])
    assert [job.id for job in jobs.jobs.page("t0", limit=10)] == ["there"]

    names = [f"{number:03d}" for number in range(1000)]
    created = jobs.jobs.create_many([new_job(name) for name in names])

    assert [job.id for job in created] == names
    assert [job.id for job in jobs.jobs.page("t0", limit=3)] == ["999", "998", "997"]


def test_one_runner_has_a_job_until_its_lease_runs_out(jobs: JobBench) -> None:
    jobs.submit("a")
    first = jobs.claim("a", "first")

    assert not jobs.is_free("a")
    jobs.clock.move(LEASE_S - 1)
    jobs.running.beat(first)
    jobs.clock.move(LEASE_S - 1)
    assert not jobs.is_free("a")
    jobs.clock.move(2)
    second = jobs.claim("a", "second")

    assert (second.job.attempt, second.epoch) == (2, first.epoch + 1)
    assert jobs.outcomes("a") == [(1, "lost"), (2, None)]


@pytest.mark.parametrize("text", ["a\x00b", "a\ud800b"], ids=["nul", "half_of_a_pair"])
def test_what_a_job_tells_is_kept_whatever_it_quotes(jobs: JobBench, text: str) -> None:
    jobs.submit("a", max_attempts=1)
    claim = jobs.claim("a")

    jobs.running.record(claim, events=[JobEvent(kind="sample", message=text, data={"prompt": text})])
    failure = JobFailed("invalid_data", f"line 1: {text}", details={"line": text}).failure
    ended = jobs.running.fail_attempt(claim, failure, pause_s=lambda _: PAUSE_S)

    assert ended.state is JobState.FAILED
    assert ended.failure is not None and ended.failure.message.startswith("line 1: a")
    messages = [event.message for event in jobs.jobs.events("a", "t0")]
    assert any(message.startswith("a") and message.endswith("b") for message in messages)


def test_nothing_of_a_runner_that_lost_its_job_is_written(jobs: JobBench) -> None:
    jobs.submit("a")
    first = jobs.claim("a", "first")
    jobs.running.record(first, saved={"step": 1})
    jobs.clock.move(LEASE_S)
    second = jobs.claim("a", "second")

    for write in (
        lambda: jobs.running.beat(first),
        lambda: jobs.running.record(first, saved={"step": 7}),
        lambda: jobs.running.finish(first, JobState.SUCCEEDED, result={"wrong": True}),
        lambda: jobs.fail(first),
        lambda: jobs.running.give_back(first, JobState.PAUSED, reason="late"),
    ):
        with pytest.raises(JobLost):
            write()

    assert second.saved == {"step": 1}
    assert jobs.running.finish(second, JobState.SUCCEEDED, result={"right": True}).result == {"right": True}
    with pytest.raises(JobLost):
        jobs.running.finish(second, JobState.FAILED, failure=LASTING)


def test_of_many_runners_that_ask_at_once_one_gets_the_job(jobs: JobBench) -> None:
    jobs.submit("a")
    barrier = threading.Barrier(8)
    got: list[object] = []

    def ask(number: int) -> None:
        barrier.wait()
        while True:
            try:
                got.append(jobs.running.claim("a", identity(str(number)), lease_s=LEASE_S))
            except StorageUnavailable:
                continue
            jobs.bench.database.close()
            return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len([claim for claim in got if claim is not None]) == 1


def test_a_job_that_failed_for_a_reason_that_may_pass_comes_again_later_and_not_for_ever(jobs: JobBench) -> None:
    jobs.submit("a", max_attempts=3)
    failed = jobs.fail(jobs.claim("a"))

    assert (failed.state, failed.not_before) == (JobState.RETRYING, jobs.clock.now() + PAUSE_S)
    assert not jobs.is_free("a")
    assert jobs.ready() == []
    jobs.clock.move(PAUSE_S)
    assert jobs.ready() == ["a"]
    jobs.fail(jobs.claim("a"))
    jobs.clock.move(2 * PAUSE_S)
    ended = jobs.fail(jobs.claim("a"))

    assert (ended.state, ended.failure and ended.failure.code) == (JobState.FAILED, "overloaded")
    assert jobs.outcomes("a") == [(1, "failed"), (2, "failed"), (3, "failed")]


def test_attempts_that_come_further_are_not_counted_against_it(jobs: JobBench) -> None:
    jobs.submit("a", max_attempts=2)
    for step in range(1, 6):
        claim = jobs.claim("a")
        jobs.running.record(claim, progress={"done": step})
        assert jobs.fail(claim).state is JobState.RETRYING
        jobs.clock.move(PAUSE_S)
    claim = jobs.claim("a")
    jobs.running.record(claim, progress={"done": 5})

    assert jobs.fail(claim).state is JobState.FAILED


def test_a_job_whose_runners_are_lost_again_and_again_fails(jobs: JobBench) -> None:
    jobs.submit("a", max_attempts=2)
    jobs.claim("a")
    jobs.clock.move(LEASE_S)
    jobs.claim("a")
    jobs.clock.move(LEASE_S)

    assert not jobs.is_free("a")
    ended = jobs.jobs.find("a", "t0")
    assert (ended.state, ended.failure and ended.failure.code) == (JobState.FAILED, "lost")


def test_a_failure_that_lasts_ends_a_job_at_once_and_a_retry_takes_it_up_where_it_was(jobs: JobBench) -> None:
    jobs.submit("a")
    claim = jobs.claim("a")
    jobs.running.record(claim, saved={"step": 3})
    ended = jobs.fail(claim, LASTING)

    assert (ended.state, ended.failure) == (JobState.FAILED, LASTING)
    assert jobs.jobs.request_retry("a", "t0").state is JobState.RETRYING
    again = jobs.claim("a")
    assert (again.saved, again.job.attempt, again.job.failure) == ({"step": 3}, 2, None)
    jobs.running.finish(again, JobState.SUCCEEDED)
    with pytest.raises(Conflict):
        jobs.jobs.request_retry("a", "t0")


def test_a_running_job_hears_of_a_pause_and_a_cancelling(jobs: JobBench) -> None:
    jobs.submit("a")
    claim = jobs.claim("a")

    jobs.jobs.request_pause("a", "t0")
    assert jobs.running.beat(claim) == JobSignals(cancel=False, pause=True)
    jobs.jobs.request_resume("a", "t0")
    assert jobs.running.beat(claim) == JobSignals(cancel=False, pause=False)
    assert jobs.jobs.request_cancel("a", "t0").state is JobState.RUNNING
    assert jobs.running.record(claim) == JobSignals(cancel=True, pause=False)
    with pytest.raises(Conflict):
        jobs.jobs.request_pause("a", "t0")


def test_a_paused_job_is_not_to_be_had_until_it_is_resumed_and_no_attempt_is_used_up(jobs: JobBench) -> None:
    jobs.submit("a")
    jobs.running.give_back(jobs.claim("a"), JobState.PAUSED, reason="paused")

    assert not jobs.is_free("a")
    assert jobs.ready() == []
    jobs.jobs.request_resume("a", "t0")
    assert jobs.ready() == ["a"]
    assert jobs.claim("a").job.attempt == 1


@pytest.mark.parametrize("leaves", ["its runner stops", "it rests", "its attempt fails"])
def test_a_pause_that_no_plan_has_heard_of_holds_the_job_however_it_leaves_its_runner(
    jobs: JobBench, leaves: str
) -> None:
    jobs.submit("a")
    claim = jobs.claim("a")
    jobs.jobs.request_pause("a", "t0")
    if leaves == "its attempt fails":
        left = jobs.fail(claim)
    else:
        rest_s = 60.0 if leaves == "it rests" else 0.0
        left = jobs.running.give_back(claim, JobState.QUEUED, not_before=jobs.clock.now() + rest_s, reason=leaves)
    jobs.clock.move(3600.0)

    assert left.state is JobState.PAUSED
    assert jobs.ready() == [] and not jobs.is_free("a")
    jobs.jobs.request_resume("a", "t0")
    assert jobs.ready() == ["a"] and jobs.is_free("a")
    goes_on = [(1, "failed"), (2, None)] if leaves == "its attempt fails" else [(1, None)]
    assert jobs.outcomes("a") == goes_on


def test_a_job_that_is_to_be_cancelled_is_not_held_by_an_earlier_pause(jobs: JobBench) -> None:
    jobs.submit("a")
    claim = jobs.claim("a")
    jobs.jobs.request_pause("a", "t0")
    jobs.jobs.request_cancel("a", "t0")

    jobs.running.give_back(claim, JobState.QUEUED, reason="its runner stops")

    assert jobs.running.beat(jobs.claim("a")).cancel


@pytest.mark.parametrize("state", ["waiting", "queued", "retrying", "paused", "running"])
def test_a_job_that_is_cancelled_ends_whatever_it_was_at(jobs: JobBench, state: str) -> None:
    jobs.submit("before")
    jobs.submit("a", needs={"before": "any"} if state == "waiting" else None)
    claim = None if state in ("waiting", "queued") else jobs.claim("a")
    if state == "retrying":
        assert claim is not None
        jobs.fail(claim)
    if state == "paused":
        assert claim is not None
        jobs.running.give_back(claim, JobState.PAUSED, reason="paused")
    assert jobs.state("a") == state

    told = jobs.jobs.request_cancel("a", "t0")

    if state in ("waiting", "queued"):
        assert told.state is JobState.CANCELLED, "it never ran: there is nothing to put down"
        return
    assert told.cancel_requested
    if state != "running":
        assert set(jobs.ready()) == {"before", "a"}, "its plan puts down what there is"
        claim = jobs.claim("a")
    assert claim is not None
    assert jobs.running.beat(claim).cancel
    assert jobs.running.finish(claim, JobState.CANCELLED, result={"checkpoint": "x"}).state is JobState.CANCELLED
    assert jobs.jobs.request_cancel("a", "t0").result == {"checkpoint": "x"}


def test_a_job_begins_when_those_before_it_have_ended_as_they_were_to(jobs: JobBench) -> None:
    jobs.jobs.create_many(
        [
            new_job("train"),
            new_job("other"),
            new_job("evaluate", needs={"train": "ok"}),
            new_job("both", needs={"train": "any", "other": "ok"}),
            new_job("report", needs={"evaluate": "any"}),
        ]
    )
    assert [jobs.state(name) for name in ("evaluate", "both", "report")] == [JobState.WAITING] * 3
    assert not jobs.is_free("evaluate")

    jobs.finish("train")
    assert [jobs.state(name) for name in ("evaluate", "both", "report")] == ["queued", "waiting", "waiting"]
    jobs.finish("other")
    assert jobs.state("both") is JobState.QUEUED
    jobs.finish("evaluate")
    assert jobs.state("report") is JobState.QUEUED


def test_what_was_to_come_after_a_job_that_did_not_succeed_is_cancelled_with_its_name_and_so_on(jobs: JobBench) -> None:
    jobs.submit("train")
    jobs.submit("evaluate", needs={"train": "ok"})
    jobs.submit("export", needs={"evaluate": "ok"})
    jobs.submit("clean", needs={"train": "any"})

    jobs.finish("train", JobState.FAILED)

    assert [jobs.state(name) for name in ("evaluate", "export", "clean")] == ["cancelled", "cancelled", "queued"]
    failure = jobs.jobs.find("export", "t0").failure
    assert failure is not None
    assert (failure.code, "evaluate" in failure.message) == ("dependency", True)
    assert jobs.submit("late", needs={"train": "any"}).state is JobState.WAITING
    assert jobs.submit("too late", needs={"train": "ok"}).state is JobState.WAITING
    jobs.waiting.settle()
    assert [jobs.state(name) for name in ("late", "too late")] == ["queued", "cancelled"]


def test_a_need_that_ends_twice_counts_once(jobs: JobBench) -> None:
    jobs.submit("first")
    jobs.submit("second")
    jobs.submit("last", needs={"first": "any", "second": "any"})
    jobs.finish("first", JobState.FAILED)
    jobs.jobs.request_retry("first", "t0")
    jobs.finish("first")

    assert jobs.state("last") is JobState.WAITING
    jobs.finish("second")
    assert jobs.state("last") is JobState.QUEUED


def test_a_waiting_job_can_be_paused_and_waits_again_when_it_is_resumed(jobs: JobBench) -> None:
    jobs.submit("first")
    jobs.submit("last", needs={"first": "ok"})

    jobs.jobs.request_pause("last", "t0")
    assert jobs.jobs.request_resume("last", "t0").state is JobState.WAITING
    jobs.jobs.request_pause("last", "t0")
    jobs.finish("first")
    assert jobs.state("last") is JobState.PAUSED
    assert jobs.jobs.request_resume("last", "t0").state is JobState.QUEUED


def test_a_job_cannot_wait_for_itself_nor_for_anothers(jobs: JobBench) -> None:
    jobs.submit("theirs", tenant="t1")

    with pytest.raises(InvalidInput, match="after"):
        jobs.submit("a", needs={"a": "ok"})
    with pytest.raises(NotFound):
        jobs.submit("a", needs={"theirs": "any"})
    with pytest.raises(NotFound):
        jobs.submit("a", parent="theirs")


def test_events_are_numbered_and_read_on_from_any_place_and_only_the_last_ones_are_kept(jobs: JobBench) -> None:
    jobs.submit("a")
    claim = jobs.claim("a")
    metrics = [JobEvent(kind="metrics", message="", data={"step": step}) for step in range(700)]
    for _ in range(16):
        jobs.running.record(claim, events=metrics)

    first = jobs.jobs.events("a", "t0", limit=2)
    assert first[0].number > 1000
    assert [event.number for event in jobs.jobs.events("a", "t0", after=11_200, limit=10)] == [11_201, 11_202]
    kept = jobs.bench.rows("SELECT COUNT(*) AS num FROM job_event")[0][0]
    assert 10_000 <= kept <= 10_700  # type: ignore[operator]


def test_tenants_take_turns_and_each_ones_own_go_by_niceness_then_age(jobs: JobBench) -> None:
    for number in range(4):
        jobs.submit(f"many {number}", tenant="t0")
    jobs.submit("urgent", tenant="t0", nice=0)
    jobs.submit("single", tenant="t1")

    assert jobs.ready(limit=3) == ["urgent", "single", "many 0"]
    assert jobs.ready(limit=3) == [], "those are on their way"
    jobs.claim("urgent")
    assert jobs.ready(limit=3) == ["many 1"], "as many as were begun"
    jobs.clock.move(10)
    assert set(jobs.ready(limit=3)) == {"single", "many 0", "many 1"}, "their messages were lost"


def test_a_job_whose_runner_is_gone_is_handed_out_again(jobs: JobBench) -> None:
    jobs.submit("a")
    assert jobs.ready() == ["a"]
    jobs.claim("a")
    jobs.clock.move(LEASE_S - 1)
    assert jobs.ready() == []
    jobs.clock.move(1)
    assert jobs.ready() == ["a"]
    assert jobs.ready() == []
