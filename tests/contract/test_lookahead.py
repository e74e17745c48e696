"""What a worker claims and begins before the outcome of what comes before it is committed: nothing is lost by it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from structlog.testing import capture_logs

from harness.journal import Bench
from harness.operations import Request, create, forward_backward, optim_step, replayed, submit_run
from harness.polling import wait_until
from harness.worker import CLAIM_S, Killed, MakeWorker, WorkerRig
from twinkle.core.operation import Claim, OperationKind, OperationState, Payload
from twinkle.storage.stores import Stores
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output
from twinkle.workers.endings import Execution

WAIT_S = 60.0
STEPS = (forward_backward(1), optim_step(), forward_backward(2), optim_step(), forward_backward(3), optim_step())


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """A clerk's thread, as in the service."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def _assert_as_one_by_one(worker: WorkerRig, bench: Bench, run: list[Request | None], adapter: str = "a") -> None:
    truth, outcomes = replayed(run)
    for seq, (code, _) in enumerate(outcomes):
        status = bench.status(adapter, seq)
        assert (status.failure.code if status.failure else status.state.value) == code, seq
    state = worker.state_before(adapter, len(run))
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)


def _once_in_a_pass(worker: WorkerRig, act: Callable[[], None], *, nth: int = 1) -> None:
    """Do something while the device is at its nth call."""
    run_passes = worker.engine.run_passes
    calls: list[int] = []

    def acting(passes):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == nth:
            act()
        return run_passes(passes)

    worker.engine.run_passes = acting  # type: ignore[method-assign]


def _column(stores: Stores, column: str, seqs: range) -> list[object]:
    ids = [f"a:req:{seq}" for seq in seqs]
    rows = stores.database.read(
        f"SELECT request_id, {column} AS value FROM operation WHERE lane = 'a' ORDER BY seq", ()
    )
    found = {row.request_id: row.value for row in rows}
    return [found[name] for name in ids]


def test_what_comes_next_is_claimed_while_the_device_is_at_work(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    seen: list[object] = []
    _once_in_a_pass(worker, lambda: seen.extend(_column(bench.stores, "state", range(1, 5))))

    worker.drain()

    assert seen == ["running"] * 4
    assert _column(bench.stores, "attempts", range(len(run))) == [1] * len(run)
    _assert_as_one_by_one(worker, bench, run)


def test_the_device_goes_on_while_an_outcome_is_committed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """The commit of the first pass waits until the device is at the second: it can only be if neither waits for it."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second = threading.Event()
    _once_in_a_pass(worker, is_at_second.set, nth=2)
    overlapped: list[bool] = []
    worker.journal.before_commit = lambda: overlapped.append(is_at_second.wait(WAIT_S))

    worker.drain()

    assert overlapped == [True]
    _assert_as_one_by_one(worker, bench, run)


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
    _once_in_a_pass(worker, is_in_next_drain.set)
    worker.drain()

    assert overlapped == [True]
    _assert_as_one_by_one(worker, bench, run)


@pytest.mark.parametrize("who_notices", ["the commit", "the keeper"])
def test_whoever_takes_the_mesh_between_two_drains_does_what_was_not_committed(
    who_notices: str, bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    run = submit_run(bench, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    has_successor = threading.Event()
    worker.journal.before_commit = partial(_assert_soon, has_successor)
    worker.drain(1)
    successor = make_worker(snapshot_every_ops=100)

    successor.drain(1)
    has_successor.set()
    if who_notices == "the keeper":
        worker.keeper.give_up()
    with capture_logs() as said:
        worker.worker.drain(budget_s=1e9)
    successor.drain()

    _assert_as_one_by_one(successor, bench, run)
    assert worker.keeper.current() is None
    assert [line["event"] for line in said].count("worker.fenced") == 1
    assert worker.residents.held == set() and not worker.worker._has_under_way


def test_results_are_brought_into_wire_form_while_the_device_goes_on(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first pass waits until the device is at the second: it can only be if neither waits for it."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second, overlapped = threading.Event(), []
    _once_in_a_pass(worker, is_at_second.set, nth=2)

    def encode(result: ForwardBackwardResult) -> bytes:
        overlapped.append(is_at_second.wait(WAIT_S))
        return encode_forward_backward_output(result)

    monkeypatch.setattr("twinkle.workers.recording.encode_forward_backward_output", encode)

    worker.drain()

    assert overlapped == [True] * 3
    _assert_as_one_by_one(worker, bench, run)


def test_a_result_that_cannot_be_written_is_an_attempt_that_failed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has gone on with what follows on it: that goes back, and everything is done anew, once."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=2, clerk=beside)
    worker.drain(1)
    is_at_second, failed = threading.Event(), []
    _once_in_a_pass(worker, is_at_second.set, nth=2)

    def encode(result: ForwardBackwardResult) -> bytes:
        assert is_at_second.wait(WAIT_S)
        if not failed:
            failed.append(result)
            raise ValueError("not today")
        return encode_forward_backward_output(result)

    monkeypatch.setattr("twinkle.workers.recording.encode_forward_backward_output", encode)
    worker.drain()
    assert _column(bench.stores, "state", range(1, 7)) == ["queued"] * 6

    bench.clock.move(1000)
    worker.drain()

    _assert_as_one_by_one(worker, bench, run)
    assert _column(bench.stores, "attempts", range(1, 7)) == [2, 1, 1, 1, 1, 1]


def test_what_ended_together_with_a_result_that_cannot_be_written_goes_back_from_there_on(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """As where a large result was being stored while what follows on it ended."""
    worker = make_worker()
    execution, endings = Execution(), worker.worker._endings
    bad = ForwardBackwardResult((), {"unnamed": 1.0})
    for seq, result in enumerate((Payload(inline=b"1"), Payload(inline=b"2"), bad, Payload(inline=b"4")), start=1):
        claim = Claim(
            request_id=f"a:req:{seq}",
            tenant="t0",
            lane="a",
            seq=seq,
            kind=OperationKind.FORWARD_BACKWARD,
            payload=Payload(inline=b""),
            attempt=1,
            num_tokens=0,
            accepted_at=0.0,
            rejection=None,
            failed_window_seq=None,
        )
        execution.begun[claim.request_id] = (claim, 0.0)
        endings.succeed(execution, claim, result, device_s=0.0, num_tokens=0, charge=1)

    assert worker.worker._recorder._write_results(execution) == {"a"}

    assert [outcome.seq for outcome in execution.outcomes] == [1, 2]
    assert [postponed.claim.seq for postponed in execution.postponed] == [3]
    assert [claim.seq for claim in execution.returned] == [4]


def test_no_adapter_comes_to_rest_for_a_recovery_point(bench: Bench, make_worker: MakeWorker) -> None:
    """One is due every eighth operation; at each pass the next one is in hand all the same."""
    run = submit_run(bench, *STEPS * 4)
    worker = make_worker(snapshot_every_ops=8)
    seen: list[object] = []
    for nth in range(1, 12):
        next_pass = range(2 * nth + 1, 2 * nth + 2)
        _once_in_a_pass(worker, partial(_look, bench, next_pass, seen), nth=nth)

    worker.drain()

    assert seen == ["running"] * 11
    assert _recovery_points(bench) == [24]
    _assert_as_one_by_one(worker, bench, run)


def test_a_recovery_point_is_written_when_its_operation_is_committed_and_not_before(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """Its state is copied as the adapter goes by, and the device goes on: what is written is the copy."""
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=4, clerk=beside)
    worker.drain(1)
    is_copied, turns, found = _once_copied(worker), [], []
    commit, tend = worker.journal.commit, worker.residents.tend

    def tending() -> None:
        turns.append(len(turns))
        tend()

    def looking(lease, outcomes, records):  # type: ignore[no-untyped-def]
        if any(outcome.seq == 4 for outcome in outcomes):
            assert is_copied.wait(WAIT_S)
            num_turns = len(turns)

            def has_noted_what_is_committed() -> bool:
                worker.worker.ring()
                return len(turns) > num_turns + 1

            wait_until(has_noted_what_is_committed, what="the loop to take back what was written")
            found.append(_recovery_points(bench))
        return commit(lease, outcomes, records)

    worker.journal.commit = looking  # type: ignore[method-assign]
    worker.residents.tend = tending  # type: ignore[method-assign]

    worker.drain()

    assert found == [[]]
    assert _recovery_points(bench) == [4]
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]
    successor = make_worker()
    for seq in (4, 6):
        truth, _ = replayed(run[: seq + 1])
        state = successor.transfers.at_once(successor.replay.state_after("a", seq)).state
        assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)


def test_no_recovery_point_is_written_of_a_state_that_never_was(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """A pass is ended by housekeeping while its commit waits; the step behind it is done, and its state copied."""
    submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=2, clerk=beside)
    worker.drain(1)
    is_copied = _once_copied(worker)

    def end_the_first() -> None:
        assert is_copied.wait(WAIT_S)
        with bench.database.transaction() as transaction:
            transaction.execute("UPDATE operation SET accepted_at = accepted_at - 9000 WHERE request_id = 'a:req:1'")
            transaction.execute("UPDATE operation SET started_at = started_at - 9000 WHERE request_id = 'a:req:1'")
        assert bench.upkeep.expire_overdue(deadline_s=3600.0) == ["a:req:1"]

    worker.journal.before_commit = end_the_first

    worker.drain()

    assert bench.status("a", 2).failure is not None
    successor = make_worker()
    worker.worker.close()
    successor.drain()
    for seq in _recovery_points(bench):
        # From the start, whatever recovery points there are.
        run = [STEPS[2], STEPS[3], STEPS[4], STEPS[5]][: max(seq - 2, 0)]
        truth, _ = replayed([create(), *run])
        state = successor.transfers.at_once(successor.replay.state_after("a", seq)).state
        assert (state.applied, state.steps) == (truth.applied, truth.steps), seq


def _once_copied(worker: WorkerRig) -> threading.Event:
    """Set when a state is copied."""
    copy_state, is_copied = worker.engine.copy_state, threading.Event()

    def copying(state):  # type: ignore[no-untyped-def]
        is_copied.set()
        return copy_state(state)

    worker.engine.copy_state = copying  # type: ignore[method-assign]
    return is_copied


def _look(bench: Bench, seqs: range, seen: list[object]) -> None:
    seen.extend(_column(bench.stores, "state", seqs))


def _recovery_points(bench: Bench) -> list[int]:
    return [row[0] for row in bench.rows("SELECT seq FROM snapshot WHERE adapter = 'a' ORDER BY seq")]


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
    _assert_as_one_by_one(worker, bench, run)


def test_a_kill_with_as_many_in_hand_as_may_be_blames_none_that_was_not_begun(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = submit_run(bench, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    running: list[object] = []

    def die() -> None:
        running.extend(_column(bench.stores, "state", range(len(run))))
        raise Killed

    _once_in_a_pass(worker, die, nth=2)
    with suppress(Killed):
        worker.drain()
    first = running.index("running")
    successor = make_worker(snapshot_every_ops=100)

    successor.drain()

    assert running[first:].count("running") == 8
    assert sum(_column(bench.stores, "suspicions", range(first + 1, len(run)))) == 0  # type: ignore[arg-type]
    assert _column(bench.stores, "attempts", range(first + 1, len(run))) == [1] * (len(run) - first - 1)
    _assert_as_one_by_one(successor, bench, run)


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
    _assert_as_one_by_one(worker, bench, run)


def test_what_follows_on_a_failure_goes_back_and_learns_of_it(bench: Bench, make_worker: MakeWorker) -> None:
    """The step behind a bad pass was claimed before anybody knew that it is bad."""
    run = submit_run(bench, forward_backward(1, is_bad=True), optim_step(), forward_backward(2), optim_step())
    worker = make_worker(snapshot_every_ops=100)

    worker.drain()

    _assert_as_one_by_one(worker, bench, run)
    assert _column(bench.stores, "attempts", range(len(run))) == [1] * len(run)


def test_what_was_made_of_a_state_that_never_was_is_not_committed(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """A pass is ended by housekeeping while its commit waits and the device is two operations further."""
    submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    is_at_second = threading.Event()
    _once_in_a_pass(worker, is_at_second.set, nth=2)

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


@pytest.mark.parametrize("when", ["in a pass", "after_claim", "before_commit", "after_commit"])
def test_a_kill_with_operations_in_hand_leaves_them_blameless(bench: Bench, make_worker: MakeWorker, when: str) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    worker.drain(1)
    if when == "in a pass":
        _once_in_a_pass(worker, _die)
    else:
        setattr(worker.journal, when, _die)
    with suppress(Killed):
        worker.drain()

    successor = make_worker(snapshot_every_ops=100)
    successor.drain()

    _assert_as_one_by_one(successor, bench, run)
    suspicions = _column(bench.stores, "suspicions", range(len(run)))
    assert (sum(suspicions) <= 1 and suspicions[2:] == [0] * 5) or suspicions[3:] == [0] * 4  # type: ignore[arg-type]


def test_behind_an_operation_that_lost_its_worker_nothing_is_claimed_ahead(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """Should it be to blame, it dies alone: what stands behind it is not in the worker's hands again."""
    submit_run(bench, *STEPS)
    victim = make_worker(snapshot_every_ops=100)
    victim.drain(1)
    _once_in_a_pass(victim, _die)
    with suppress(Killed):
        victim.drain()
    successor = make_worker(snapshot_every_ops=100)
    seen: list[object] = []
    _once_in_a_pass(successor, lambda: seen.extend(_column(bench.stores, "state", range(1, 4))))

    successor.drain()

    assert seen == ["running", "queued", "queued"]
    assert _column(bench.stores, "suspicions", range(1, 7)) == [1, 0, 0, 0, 0, 0]


def test_a_worker_that_ends_gives_back_what_it_has_claimed_ahead(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    worker.drain(2)

    worker.worker.close()

    states = _column(bench.stores, "state", range(len(run)))
    assert set(states) <= {OperationState.DONE.value, OperationState.QUEUED.value}
    successor = make_worker()
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]
    successor.drain()
    _assert_as_one_by_one(successor, bench, run)


@pytest.mark.parametrize("places", [1, 8])
def test_an_adapter_that_fills_the_device_is_claimed_ahead_of_as_well(
    bench: Bench, make_worker: MakeWorker, places: int
) -> None:
    """What follows needs no place: its adapter is there."""
    submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100, max_resident=places)
    seen: list[object] = []
    _once_in_a_pass(worker, lambda: seen.extend(_column(bench.stores, "state", range(3, 6))), nth=2)

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
        seen.extend(_column(bench.stores, "state", range(1, 6)))

    _once_in_a_pass(worker, look, nth=2)
    if when != "never":
        worker.drain(2)
        setattr(worker.journal, when, _die)
    with suppress(Killed):
        worker.drain()
    successor = make_worker(snapshot_every_ops=100)
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]

    successor.drain()

    if when == "never":
        assert worker.engine.batch_sizes[:2] == [3, 3]
        assert len(worker.engine.batch_sizes) <= 6
    for name, run in runs.items():
        _assert_as_one_by_one(worker if when == "never" else successor, bench, run, name)


def test_what_arrives_while_the_last_outcomes_are_written_is_done_before_the_worker_rests(
    bench: Bench, make_worker: MakeWorker, beside: ThreadPoolExecutor
) -> None:
    """Nothing is claimed while outcomes are being written; they may be written by the end of the turn that waited."""
    runs = {"a": submit_run(bench, forward_backward(1), optim_step(), adapter="a")}
    worker = make_worker(snapshot_every_ops=100, clerk=beside)
    worker.drain(1)
    may_commit = threading.Event()
    worker.journal.before_commit = partial(_assert_soon, may_commit)
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
        _assert_as_one_by_one(worker, bench, run, name)


def _assert_soon(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def _die() -> None:
    raise Killed


def test_adapters_that_wait_beside_each_other_go_through_the_model_together(
    bench: Bench, make_worker: MakeWorker
) -> None:
    for number in range(6):
        submit_run(bench, *[forward_backward(1), optim_step()] * 4, adapter=f"a{number}")
    worker = make_worker(max_resident=8)

    worker.drain()

    assert worker.engine.batch_sizes == [4] * 6


# -- kills in the gaps between what the device, the clerk and the teller do -------------------------------------------

GAPS = {
    "worker.claimed": "run",
    "worker.claimed_ahead": "lookahead",
    "worker.taken_ahead": "lookahead",
    "worker.executed": "recording",
    "worker.committed": "recording",
    "worker.telling": "recording",
    "worker.published": "recording",
    "worker.handed_over": "run",
    "worker.drained": "run",
    "worker.noting": "recording",
    "snapshot.copied": "residents",
}
"""The points of a worker that looks ahead, and the file of each."""
SOAK_ROUNDS = 60
SOAK_SEED = 20261123


def _pass_by(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    for file in {*GAPS.values()}:
        monkeypatch.setattr(f"twinkle.workers.{file}.crash_point", act)


def _survives_a_kill(
    bench: Bench,
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    point: str,
    nth: int,
    adapters: tuple[str, ...],
) -> bool:
    """Some adapters' work is done once each though a worker died; whether it came by the point for the nth time."""
    runs = {name: submit_run(bench, *STEPS, adapter=name) for name in adapters}
    passed: list[str] = []
    killed: list[str] = []

    def die(name: str) -> None:
        passed.append(name)
        # None of the threads of a process that was killed comes by anything any more.
        if killed or (name == point and passed.count(point) == nth):
            killed.append(name)
            raise Killed

    _pass_by(monkeypatch, die)
    with ThreadPoolExecutor(1) as beside:
        worker = make_worker(snapshot_every_ops=2, clerk=beside)
        with suppress(Killed):
            worker.drain(1)
            while worker.worker.drain(budget_s=CLAIM_S):
                pass
    worker.keeper.stop = lambda: None  # type: ignore[method-assign]
    _pass_by(monkeypatch, lambda _: None)
    successor = make_worker(snapshot_every_ops=100)

    successor.drain()

    for name, run in runs.items():
        _assert_as_one_by_one(successor, bench, run, name)
    return bool(killed)


def test_a_kill_in_a_gap_between_device_clerk_and_teller_leaves_each_operation_done_once(
    bench: Bench, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, point in enumerate(GAPS):
        adapters = tuple(f"{number}-{letter}" for letter in "abc")
        assert _survives_a_kill(bench, make_worker, monkeypatch, point=point, nth=2, adapters=adapters), point


@pytest.mark.soak
def test_kills_in_gaps_drawn_by_chance_leave_each_operation_done_once(
    bench: Bench, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(SOAK_SEED)
    num_killed = 0
    for number in range(SOAK_ROUNDS):
        point, nth = dice.choice(list(GAPS)), dice.randint(1, 7)
        adapters = tuple(f"{number}-{letter}" for letter in "abcdef"[: dice.randint(1, 6)])
        print(point, nth, adapters)
        num_killed += _survives_a_kill(bench, make_worker, monkeypatch, point=point, nth=nth, adapters=adapters)
    assert num_killed > SOAK_ROUNDS // 2
