"""Operations in Celery's event stream, as a real receiver sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from harness.event_watcher import Watcher
from harness.polling import wait_until
from harness.servers import RedisServer
from twinkle.core.operation import Claim, Failure, FailureCategory, OperationKind, Outcome, Payload
from twinkle.core.settings import Settings
from twinkle.tasks.app import make_app
from twinkle.workers.report import OperationReporter

_SECRET = b"the prompt"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A redis-server to be killed."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def app(server: RedisServer) -> Celery:
    return make_app(Settings(redis_url=server.url))  # type: ignore[arg-type]


def _claim(seq: int, *, attempt: int = 1) -> Claim:
    return Claim(
        request_id=f"a:req:{seq}",
        tenant="tenant1",
        lane="a",
        seq=seq,
        kind=OperationKind.FORWARD_BACKWARD,
        payload=Payload(inline=_SECRET),
        attempt=attempt,
        num_tokens=1,
        accepted_at=0.0,
        rejection=None,
        failed_window_seq=None,
    )


def _outcome(claim: Claim, *, fails: bool = False) -> Outcome:
    failure = Failure(message=_SECRET.decode(), category=FailureCategory.USER, code="invalid_input") if fails else None
    result = None if fails else Payload(inline=_SECRET)
    return Outcome(
        request_id=claim.request_id, lane=claim.lane, seq=claim.seq, kind=claim.kind, result=result, failure=failure
    )


@pytest.fixture
def reporter(app: Celery) -> Iterator[OperationReporter]:
    reporter = OperationReporter(app, "mesh0@host", name_of_tenant=str.title)
    reporter.start()
    yield reporter
    reporter.close()


def test_every_operation_is_seen_as_a_task_of_its_own_with_its_facts_and_no_data(
    server: RedisServer, app: Celery, reporter: OperationReporter
) -> None:
    watcher = Watcher(app, server.url)
    good, bad, flaky = _claim(1), _claim(2), _claim(3)
    reporter.started([good, bad, flaky])
    reporter.ended([_outcome(good), _outcome(bad, fails=True)], started_at=0.0)
    reporter.retried(flaky, "internal error, incident 1f2e")
    reporter.started([_claim(3, attempt=2)])
    wait_until(lambda: len(watcher.kinds("a:req:3")) == 5, what="all events")

    begun = ["task-received", "task-started"]
    assert watcher.kinds("a:req:1") == [*begun, "task-succeeded"]
    assert watcher.kinds("a:req:2") == [*begun, "task-failed"]
    assert watcher.kinds("a:req:3") == [*begun, "task-retried", *begun]
    first = watcher.events[0]
    assert (first["name"], first["hostname"], first["retries"]) == ("twinkle.forward_backward", "mesh0@host", 0)
    assert first["kwargs"] == "{'tenant': 'Tenant1', 'adapter': 'a', 'seq': 1, 'attempt': 1}"
    (failed,) = [event for event in watcher.events if event["type"] == "task-failed"]
    assert failed["exception"] == "user: invalid_input"
    assert _SECRET.decode() not in repr(watcher.events)


def test_a_broker_that_dies_costs_events_and_nothing_else(
    server: RedisServer, app: Celery, reporter: OperationReporter
) -> None:
    watcher = Watcher(app, server.url)
    reporter.started([_claim(1)])
    wait_until(lambda: watcher.kinds("a:req:1"), what="the first events")
    server.kill()
    for seq in range(2, 5):
        reporter.started([_claim(seq)])
    server.start()
    late = Watcher(app, server.url)

    def is_seen_again() -> bool:
        reporter.started([_claim(9)])
        return bool(late.kinds("a:req:9"))

    wait_until(is_seen_again, what="events after the broker came back", deadline_s=40)


def test_an_error_nobody_thought_of_costs_its_events_and_none_that_come_later(server: RedisServer, app: Celery) -> None:
    asked: list[str] = []

    def name_of(tenant: str) -> str:
        asked.append(tenant)
        if len(asked) == 1:
            raise ZeroDivisionError
        return tenant.title()

    reporter = OperationReporter(app, "mesh0@host", name_of_tenant=name_of)
    reporter.start()
    watcher = Watcher(app, server.url)
    reporter.started([_claim(1)])
    wait_until(lambda: asked, what="the first was described")
    reporter.started([_claim(2)])

    wait_until(lambda: watcher.kinds("a:req:2"), what="later events")
    reporter.close()


def test_what_was_reported_before_the_end_is_still_sent(server: RedisServer, app: Celery) -> None:
    watcher = Watcher(app, server.url)
    reporter = OperationReporter(app, "mesh0@host", name_of_tenant=str.title)
    reporter.start()
    reporter.started([_claim(1)])

    reporter.close()

    wait_until(lambda: len(watcher.kinds("a:req:1")) == 2, what="the last events")
