"""How jobs come to those who run them: by messages of which any may be lost, and seen attempt by attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import redis
from celery import Celery

from harness.event_watcher import Watcher
from harness.job_life import LASTING, LEASE_S, JobBench
from harness.journal import Bench
from harness.polling import PATIENCE_S, wait_until
from harness.servers import RedisServer
from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import JobState
from twinkle.core.settings import Settings
from twinkle.tasks.app import make_app
from twinkle.tasks.jobs import JOBS_QUEUE, AttemptReporter, JobBell, JobDispatcher, register_jobs, task_id


@pytest.fixture
def jobs(bench: Bench) -> JobBench:
    return JobBench(bench)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A broker of one's own."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def app(server: RedisServer) -> Celery:
    return make_app(Settings(redis_url=server.url))  # type: ignore[arg-type]


@pytest.fixture
def dispatcher(app: Celery, jobs: JobBench, server: RedisServer) -> JobDispatcher:
    return JobDispatcher(app, jobs.waiting, server.url)


def _num_messages(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        return int(client.llen(JOBS_QUEUE))  # type: ignore[arg-type]


def test_however_many_jobs_wait_a_few_messages_are_on_the_queue(
    jobs: JobBench, dispatcher: JobDispatcher, server: RedisServer
) -> None:
    for number in range(40):
        jobs.submit(f"job {number}")
    for _ in range(5):
        dispatcher.dispatch()
        jobs.clock.move(10)

    assert _num_messages(server) == 16


def test_lost_messages_come_again_and_those_of_a_broker_that_is_away_when_it_is_back(
    jobs: JobBench, dispatcher: JobDispatcher, server: RedisServer
) -> None:
    jobs.submit("a")
    assert dispatcher.dispatch() == 1
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    assert dispatcher.dispatch() == 0, "it may still be on its way"
    jobs.clock.move(10)
    assert dispatcher.dispatch() == 1

    server.kill()
    jobs.clock.move(10)
    assert dispatcher.dispatch() == 0
    server.start()
    assert dispatcher.dispatch() == 1
    assert _num_messages(server) == 1


def test_a_rung_bell_hands_out_what_waits(jobs: JobBench, dispatcher: JobDispatcher, server: RedisServer) -> None:
    jobs.submit("a")
    bell = JobBell(dispatcher)
    bell.start()
    bell.ring()
    wait_until(lambda: _num_messages(server), what="its message")
    bell.stop()


def test_a_bell_goes_on_ringing_whatever_one_look_met(
    jobs: JobBench, dispatcher: JobDispatcher, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.submit("a")
    dispatch, met = dispatcher.dispatch, Event()

    def stumbles() -> int:
        met.set()
        raise RuntimeError("over one row")

    monkeypatch.setattr(dispatcher, "dispatch", stumbles)
    bell = JobBell(dispatcher)
    bell.start()
    bell.ring()
    assert met.wait(PATIENCE_S)
    monkeypatch.setattr(dispatcher, "dispatch", dispatch)
    bell.ring()

    wait_until(lambda: _num_messages(server), what="its message")
    bell.stop()


def test_an_attempt_is_shown_and_goes_on_while_the_journal_does_not_say_whose_it_is(
    jobs: JobBench, app: Celery, server: RedisServer
) -> None:
    def away(_: str) -> str:
        raise StorageUnavailable("the database is away")

    watcher = Watcher(app, server.url)
    jobs.submit("a")

    AttemptReporter(app, reason="submitted", name_of_tenant=away).began(jobs.claim("a").job)

    wait_until(lambda: watcher.kinds(task_id("a", 1)) == ["task-received", "task-started"], what="its events")


def test_each_attempt_is_a_task_named_by_its_kind_and_told_without_words_of_the_tenant(
    jobs: JobBench, app: Celery, server: RedisServer
) -> None:
    watcher = Watcher(app, server.url)
    jobs.submit("a")

    def reporter(reason: str) -> AttemptReporter:
        return AttemptReporter(app, reason=reason, name_of_tenant=str.title)

    first = jobs.claim("a")
    reporter("submitted").began(first.job)
    reporter("submitted").left(jobs.fail(first), 1.0)
    jobs.clock.move(10)
    reporter("retry").began(jobs.claim("a").job)
    jobs.clock.move(LEASE_S)
    third = jobs.claim("a")
    reporter("lost").began(third.job)
    reporter("lost").left(jobs.fail(third, LASTING), 1.0)
    wait_until(lambda: len(watcher.kinds(task_id("a", 3))) == 3, what="all events")

    begun = ["task-received", "task-started"]
    assert [watcher.kinds(task_id("a", attempt)) for attempt in (1, 2, 3)] == [
        [*begun, "task-retried"],
        [*begun, "task-failed"],
        [*begun, "task-failed"],
    ]
    received = next(event for event in watcher.events if event["type"] == "task-received")
    assert received["name"] == "twinkle.job.ops"
    assert "'tenant': 'T0'" in received["kwargs"]
    assert "'attempt': 1" in received["kwargs"]
    assert "'reason': 'submitted'" in received["kwargs"]
    assert LASTING.message not in str(watcher.events)


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.CANCELLED])
def test_how_an_attempt_ends_well_is_seen_too(
    jobs: JobBench, app: Celery, server: RedisServer, state: JobState
) -> None:
    watcher = Watcher(app, server.url)
    jobs.submit("a")
    reporter = AttemptReporter(app, reason="submitted", name_of_tenant=str.title)
    reporter.left(jobs.finish("a", state), 1.0)

    expected = {JobState.SUCCEEDED: "task-succeeded", JobState.CANCELLED: "task-revoked"}[state]
    wait_until(lambda: watcher.kinds(task_id("a", 1)) == [expected], what="its end")


def test_a_message_of_every_kind_leads_to_its_job(app: Celery) -> None:
    ran: list[tuple[str, str]] = []
    register_jobs(app, lambda job, reporter: ran.append((job, reporter.reason)), name_of_tenant=str.title)

    for kind in ("ops", "sft", "batch"):
        app.tasks[f"twinkle.job.{kind}"](job=kind, tenant="t0", kind=kind, attempt=1, reason="submitted")

    assert ran == [("ops", "submitted"), ("sft", "submitted"), ("batch", "submitted")]
