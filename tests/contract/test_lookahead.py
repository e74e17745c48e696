"""What a worker claims and begins before the outcome of what comes before it is committed: nothing is lost by it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from structlog.testing import capture_logs

from harness.journal import Bench
from harness.lookahead import STEPS, WAIT_S, assert_as_one_by_one, assert_soon, column, die, once_in_a_pass
from harness.operations import forward_backward, optim_step, submit_run
from harness.worker import Killed, MakeWorker
from twinkle.core.operation import OperationState
from twinkle.wire.bodies.base import parse_body


def test_what_comes_next_is_claimed_while_the_device_is_at_work(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    seen: list[object] = []
    once_in_a_pass(worker, lambda: seen.extend(column(bench.stores, "state", range(1, 5))))

    worker.drain()

    assert seen == ["running"] * 4
    assert column(bench.stores, "attempts", range(len(run))) == [1] * len(run)
    assert_as_one_by_one(worker, bench, run)


def test_the_device_goes_on_while_an_outcome_is_committed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """The commit of the first pass waits until the device is at the second: it can only be if neither waits for it."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second = threading.Event()
    once_in_a_pass(worker, is_at_second.set, nth=2)
    overlapped: list[bool] = []
    worker.journal.before_commit = lambda: overlapped.append(is_at_second.wait(WAIT_S))

    worker.drain()

    assert overlapped == [True]
    assert_as_one_by_one(worker, bench, run)


def test_the_device_does_not_wait_for_a_commit_because_the_time_of_a_drain_is_over(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """The commit of the last turn before it was over waits until the next drain has had its first pass."""
    run = submit_run(bench, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_in_next_drain, overlapped = threading.Event(), list[bool]()
    worker.journal.before_commit = lambda: overlapped.append(is_in_next_drain.wait(WAIT_S))

    worker.drain(1)
    once_in_a_pass(worker, is_in_next_drain.set)
    worker.drain()

    assert overlapped == [True]
    assert_as_one_by_one(worker, bench, run)


@pytest.mark.parametrize("who_notices", ["the commit", "the keeper"])
def test_whoever_takes_the_mesh_between_two_drains_does_what_was_not_committed(
    who_notices: str, bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    run = submit_run(bench, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    has_successor = threading.Event()
    worker.journal.before_commit = partial(assert_soon, has_successor)
    worker.drain(1)
    successor = make_worker(snapshot_every_ops=100)

    successor.drain(1)
    has_successor.set()
    if who_notices == "the keeper":
        worker.keeper.give_up()
    with capture_logs() as said:
        worker.worker.drain(budget_s=1e9)
    successor.drain()

    assert_as_one_by_one(successor, bench, run)
    assert worker.keeper.current() is None
    assert [line["event"] for line in said].count("worker.fenced") == 1
    assert worker.residents.held == set() and not worker.worker._has_under_way


def test_of_an_adapter_that_is_alone_several_steps_are_claimed_by_one_look(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = submit_run(bench, *STEPS, *STEPS, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    claim, claimed = worker.journal.claim, list[list[int]]()

    def counted(*arguments, **named):  # type: ignore[no-untyped-def]
        claims = claim(*arguments, **named)
        claimed.append([one.seq for one in claims])
        return claims

    worker.journal.claim = counted  # type: ignore[method-assign]

    worker.drain()

    by_looks = [seqs for seqs in claimed if seqs]
    assert [seq for seqs in by_looks for seq in seqs] == list(range(len(run)))
    assert [len(seqs) for seqs in by_looks] == [1, 1, 4, 4, 4, 4, 4, 3]
    assert_as_one_by_one(worker, bench, run)


def test_requests_of_optimizer_steps_are_read_ahead_and_bad_ones_fail_in_their_turn(
    bench: Bench, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit_run(bench, *STEPS, optim_step(float("nan")), *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    read_in_turn: list[bytes] = []

    def read(body_class, raw):  # type: ignore[no-untyped-def]
        read_in_turn.append(raw)
        return parse_body(body_class, raw)

    monkeypatch.setattr("twinkle.workers.singles.parse_body", read)

    worker.drain()

    assert read_in_turn == []
    assert bench.status("a", 7).state is OperationState.FAILED
    assert_as_one_by_one(worker, bench, run)


def test_what_follows_on_a_failure_goes_back_and_learns_of_it(bench: Bench, make_worker: MakeWorker) -> None:
    """The step behind a bad pass was claimed before anybody knew that it is bad."""
    run = submit_run(bench, forward_backward(1, is_bad=True), optim_step(), forward_backward(2), optim_step())
    worker = make_worker(snapshot_every_ops=100)

    worker.drain()

    assert_as_one_by_one(worker, bench, run)
    assert column(bench.stores, "attempts", range(len(run))) == [1] * len(run)


def test_what_was_made_of_a_state_that_never_was_is_not_committed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """A pass is ended by housekeeping while its commit waits and the device is two operations further."""
    submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second = threading.Event()
    once_in_a_pass(worker, is_at_second.set, nth=2)

    def end_the_first() -> None:
        assert is_at_second.wait(WAIT_S)
        with bench.database.transaction() as transaction:
            transaction.execute("UPDATE operation SET accepted_at = accepted_at - 9000 WHERE request_id = 'a:req:1'")
            transaction.execute("UPDATE operation SET started_at = started_at - 9000 WHERE request_id = 'a:req:1'")
        assert bench.upkeep.expire_overdue(deadline_s=3600.0) == ["a:req:1"]

    worker.journal.before_commit = end_the_first

    worker.drain()

    codes = [bench.status("a", seq).failure for seq in range(1, 7)]
    assert [failure.code if failure else "done" for failure in codes] == [
        "deadline",
        "window_failed",
        "done",
        "done",
        "done",
        "done",
    ]
    successor = make_worker()
    worker.worker.close()
    successor.drain()
    assert worker.state_before("a", 7) == successor.state_before("a", 7)


def test_a_worker_that_ends_gives_back_what_it_has_claimed_ahead(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    worker.drain(2)

    worker.worker.close()

    states = column(bench.stores, "state", range(len(run)))
    assert set(states) <= {OperationState.DONE.value, OperationState.QUEUED.value}
    successor = make_worker()
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]
    successor.drain()
    assert_as_one_by_one(successor, bench, run)


@pytest.mark.parametrize("places", [1, 8])
def test_an_adapter_that_fills_the_device_is_claimed_ahead_of_as_well(
    bench: Bench, make_worker: MakeWorker, places: int
) -> None:
    """What follows needs no place: its adapter is there."""
    submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, max_resident=places)
    seen: list[object] = []
    once_in_a_pass(worker, lambda: seen.extend(column(bench.stores, "state", range(3, 6))), nth=2)

    worker.drain()

    assert seen == ["running"] * 3


@pytest.mark.parametrize("when", ["never", "after_claim", "before_commit", "after_commit"])
def test_the_next_batch_of_several_adapters_is_claimed_while_this_one_is_at_work(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor, when: str
) -> None:
    """One that arrives while the device is at work is in it too; whoever dies leaves each operation done once."""
    runs = {name: submit_run(bench, *STEPS, adapter=name) for name in "abc"}
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    seen: list[object] = []

    def look() -> None:
        runs["d"] = submit_run(bench, *STEPS, adapter="d")
        seen.extend(column(bench.stores, "state", range(1, 6)))

    once_in_a_pass(worker, look, nth=2)
    if when != "never":
        worker.drain(2)
        setattr(worker.journal, when, die)
    with suppress(Killed):
        worker.drain()
    successor = make_worker(snapshot_every_ops=100)
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]

    successor.drain()

    if when == "never":
        assert worker.engine.batch_sizes[:2] == [3, 3]
        assert len(worker.engine.batch_sizes) <= 6
    for name, run in runs.items():
        assert_as_one_by_one(worker if when == "never" else successor, bench, run, name)


def test_what_arrives_while_the_last_outcomes_are_written_is_done_before_the_worker_rests(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """Nothing is claimed while outcomes are being written; they may be written by the end of the turn that waited."""
    runs = {"a": submit_run(bench, forward_backward(1), optim_step(), adapter="a")}
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    may_commit = threading.Event()
    worker.journal.before_commit = partial(assert_soon, may_commit)
    step, tend = worker.engine.optim_step, worker.residents.tend
    is_done = threading.Event()
    turns_at_rest: list[int] = []

    def last_step(*arguments):  # type: ignore[no-untyped-def]
        is_done.set()
        return step(*arguments)

    def tend_and_let_commit() -> None:
        """Late in each turn: at the end of the first one that found all done and nothing noted."""
        tend()
        if is_done.is_set():
            turns_at_rest.append(len(turns_at_rest))
        if len(turns_at_rest) == 2 and not may_commit.is_set():
            runs["b"] = submit_run(bench, forward_backward(1), optim_step(), adapter="b")
            may_commit.set()
            # One thread: it comes to this when it has committed.
            beside.submit(int).result(WAIT_S)

    worker.engine.optim_step = last_step  # type: ignore[method-assign]
    worker.residents.tend = tend_and_let_commit  # type: ignore[method-assign]

    worker.drain()

    assert may_commit.is_set(), "the loop never stood before outcomes that were being written"
    for name, run in runs.items():
        assert_as_one_by_one(worker, bench, run, name)


def test_adapters_that_wait_beside_each_other_go_through_the_model_together(
    bench: Bench, make_worker: MakeWorker
) -> None:
    for number in range(6):
        submit_run(bench, *[forward_backward(1), optim_step()] * 4, adapter=f"a{number}")
    worker = make_worker(max_resident=8)

    worker.drain()

    assert worker.engine.batch_sizes == [4] * 6
