"""Runs that take up a past state: their numbers, what they come to, and what the journal keeps for them."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.clock import HandClock
from harness.journal import Bench, new_adapter, submission
from harness.operations import Request, forward_backward, load, optim_step, save
from harness.worker import Killed, MakeWorker, WorkerRig
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, OperationKind, OperationState
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import FolderStore
from twinkle.workers.engines.null_engine import NullState

KEEP_ALL = Retention(keep_s=1e12, every_ops=4, max_snapshots=100)
STEP = (OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP)


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    """Workers that keep everything."""
    return partial(make_worker, retention=KEEP_ALL)


def _steps(*learning_rates: float) -> list[Request]:
    return [request for rate in learning_rates for request in (forward_backward(int(rate)), optim_step(rate))]


def _submit(bench: Bench, *requests: Request, adapter: str = "a", begin: int = 1) -> None:
    bench.append(*(request.numbered(adapter, begin + place) for place, request in enumerate(requests)))


def _state(worker: WorkerRig, adapter: str, next_seq: int) -> tuple[str, str, int]:
    state: NullState = worker.state_before(adapter, next_seq)
    return state.applied, state.pending, state.steps


def _straight(bench: Bench, worker: WorkerRig, adapter: str, *requests: Request) -> tuple[str, str, int]:
    """What a run of its own comes to without anything happening to it."""
    bench.adapter(adapter)
    _submit(bench, *requests, adapter=adapter)
    worker.drain()
    return _state(worker, adapter, len(requests) + 1)


# -- rewinds ----------------------------------------------------------------------------------------------------------


def test_a_run_rewound_to_a_step_goes_on_as_if_the_rest_had_never_been(bench: Bench, make_worker: MakeWorker) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3, 4))
    worker.drain()

    accepted = bench.branches.rewind("a", "t0", at=bench.branches.seq_of("a", step=2), request_key=None)
    _submit(bench, *_steps(5), begin=9)
    worker.drain()

    assert accepted.request_id == "a:req:9"
    assert bench.status("a", 9).state is OperationState.DONE
    assert _state(worker, "a", 12) == _straight(bench, worker, "straight", *_steps(1, 2, 5))
    assert [(step.number, step.seq) for step in bench.branches.steps("a", limit=9)] == [(1, 2), (2, 4), (3, 11)]
    assert [(step.number, step.seq) for step in bench.branches.steps("a", limit=1)] == [(3, 11)]


def test_a_client_that_knows_nothing_of_a_rewind_goes_on_with_its_own_numbers(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq, STEP[seq % 2 - 1]) for seq in range(1, 5)))
    bench.run(lease)
    bench.branches.rewind("a", "t0", at=2, request_key=None)
    bench.run(lease)

    first, resent = (bench.append(submission("a", 5))[0] for _ in range(2))
    bench.branches.rewind("a", "t0", at=4, request_key=None)
    later = bench.append(submission("a", 6), submission("a", 3), submission("a", 5))

    assert [answer.request_id for answer in (first, resent, *later)] == [
        "a:req:6", "a:req:6", "a:req:8", "a:req:3", "a:req:6",
    ]  # fmt: skip
    assert [answer.is_new for answer in (first, resent, *later)] == [True, False, True, False, False]
    assert bench.run(lease) == [("a", 6), ("a", 7), ("a", 8)]
    assert bench.adapters.next_seq("a") == 7


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.sampled_from(["step", "rewind"]), min_size=1, max_size=12), data=st.data())
def test_any_resend_after_any_rewinds_finds_its_own_future(
    bench: Bench, lease: Lease, plan: list[str], data: st.DataObject
) -> None:
    adapter = f"run{len(bench.rows('SELECT id FROM lane'))}"
    bench.created(lease, adapter)
    sent: dict[int, str] = {}
    for move in plan:
        if move == "step":
            number = len(sent) + 1
            (answer,) = bench.append(submission(adapter, number, OperationKind.OPTIM_STEP, body=b"%d" % number))
            sent[number] = answer.request_id
        else:
            seqs = [0, *(step.seq for step in bench.branches.steps(adapter, limit=99))]
            bench.branches.rewind(adapter, "t0", at=data.draw(st.sampled_from(seqs)), request_key=None)
        if data.draw(st.booleans()):
            bench.run(lease)

    again = {
        number: bench.append(submission(adapter, number, OperationKind.OPTIM_STEP, body=b"%d" % number))[0]
        for number in sent
    }

    assert {number: answer.request_id for number, answer in again.items()} == sent
    assert len(set(sent.values())) == len(sent)
    assert not any(answer.is_new for answer in again.values())


def test_a_rewind_waits_for_what_was_accepted_before_it_and_is_done_once_for_each_wish(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq, STEP[seq % 2 - 1]) for seq in range(1, 3)))
    bench.run(lease)
    bench.append(submission("a", 4))

    first, again = (bench.branches.rewind("a", "t0", at=2, request_key="wish") for _ in range(2))
    before = bench.run(lease)
    bench.append(submission("a", 3))

    assert (first.request_id, first.is_new, again.request_id, again.is_new) == ("a:req:5", True, "a:req:5", False)
    assert (before, bench.run(lease)) == ([], [("a", 3), ("a", 4), ("a", 5)])
    with pytest.raises(Conflict):
        bench.branches.rewind("a", "t0", at=0, request_key="wish")


def test_what_a_run_cannot_go_back_to(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq, STEP[seq % 2 - 1]) for seq in range(1, 6)))
    bench.run(lease)
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET floor_seq = 2 WHERE id = 'a'")

    for at, words in (
        (5, "last such operation before it is 4"),
        (6, "not executed"),
        (0, "no longer kept; go back to 2"),
    ):
        with pytest.raises(InvalidInput, match=words):
            bench.branches.rewind("a", "t0", at=at, request_key=None)
    with pytest.raises(InvalidInput, match="made 2 steps"):
        bench.branches.seq_of("a", step=3)
    with pytest.raises(NotFound):
        bench.branches.rewind("a", "t1", at=4, request_key=None)
    assert bench.lane("a").max_seq == 5


def test_a_rewind_closes_the_window_of_a_failed_pass(bench: Bench, make_worker: MakeWorker) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1), forward_backward(is_bad=True))
    worker.drain()

    bench.branches.rewind("a", "t0", at=2, request_key=None)
    _submit(bench, *_steps(2), begin=4)
    worker.drain()

    assert bench.status("a", 6).state is OperationState.DONE
    assert _state(worker, "a", 7) == _straight(bench, worker, "straight", *_steps(1, 2))


@pytest.mark.parametrize("when", ["after_claim", "before_commit", "after_commit"])
def test_a_worker_killed_around_a_rewind_leaves_it_done_once(bench: Bench, make_worker: MakeWorker, when: str) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3))
    worker.drain()
    bench.branches.rewind("a", "t0", at=2, request_key=None)
    setattr(worker.journal, when, _die)
    with suppress(Killed):
        worker.drain()

    heir = make_worker()
    _submit(bench, *_steps(4), begin=7)
    heir.drain()
    heir.clock.move(60)
    heir.drain()

    assert _state(heir, "a", 10) == _straight(bench, heir, "straight", *_steps(1, 4))


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_fork_with_the_same_operations_comes_to_the_same_state_and_leaves_its_source_alone(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3, 4, 5))
    worker.drain()

    accepted = bench.branches.fork(new_adapter("b"), source="a", at=bench.branches.seq_of("a", step=3))
    again = bench.branches.fork(new_adapter("b"), source="a", at=6)
    _submit(bench, *_steps(4, 5), adapter="b")
    worker.drain()

    assert (accepted.request_id, accepted.is_new, again.is_new) == ("b:req:0", True, False)
    assert _state(worker, "b", 5) == _state(worker, "a", 11)
    origin = bench.branches.origin("b")
    assert origin is not None and (origin.source, origin.at) == ("a", 6)
    assert [fork.adapter for fork in bench.branches.forks("a")] == ["b"]


def test_a_wish_by_a_step_is_answered_again_as_it_was_though_that_step_was_made_anew(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker, branches = make_worker(), bench.branches
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3))
    worker.drain()

    def fork(adapter: str, step: int) -> Accepted:
        at = branches.seq_of_fork(adapter, source="a", step=step)
        return branches.fork(new_adapter(adapter), source="a", at=at, step=step)

    def rewind(key: str, step: int) -> Accepted:
        at = branches.seq_of_rewind("a", step=step, request_key=key)
        return branches.rewind("a", "t0", at=at, step=step, request_key=key)

    first = fork("b", 3), rewind("back", 2)
    worker.drain()
    rewind("further", 1)
    _submit(bench, *_steps(4, 5), begin=7)
    worker.drain()
    again = fork("b", 3), rewind("back", 2)

    assert branches.seq_of("a", step=3) > 6 and branches.seq_of("a", step=2) > 4
    assert [one.request_id for one in again] == [one.request_id for one in first]
    assert [one.is_new for one in (*first, *again)] == [True, True, False, False]
    assert [fork("c", 3).is_new, fork("b", 3).is_new, rewind("anew", 3).is_new] == [True, False, True]
    for wish in (partial(fork, "b", 2), partial(rewind, "back", 1)):
        with pytest.raises(Conflict):
            wish()


def test_a_fork_of_a_run_that_was_forgotten_meanwhile_is_refused_by_name(bench: Bench) -> None:
    with pytest.raises(NotFound, match="no training run 'gone'"):
        bench.branches.fork(new_adapter("b"), source="gone", at=0)


def test_a_fork_outlives_its_source_and_the_death_of_its_worker(
    bench: Bench, store: FolderStore, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3))
    worker.drain()
    expected = _state(worker, "a", 7)
    bench.branches.fork(new_adapter("b"), source="a", at=6)
    worker.journal.after_commit = _die
    with suppress(Killed):
        worker.drain()
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE operation SET payload = NULL WHERE lane = 'a'")
        transaction.execute("DELETE FROM snapshot WHERE adapter = 'a'")

    heir = make_worker()

    assert _state(heir, "b", 1) == expected


def test_what_a_fork_waits_for_is_not_pruned(bench: Bench, make_worker: MakeWorker, clock: HandClock) -> None:
    worker = make_worker(snapshot_every_ops=2)
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3, 4))
    worker.drain()
    worker.settle()
    bench.branches.fork(new_adapter("b"), source="a", at=4)
    clock.move(1000)

    keep_nothing = Retention(keep_s=1.0, every_ops=1, max_snapshots=2)
    bench.snapshots.prune("a", keep_nothing.choose)
    worker.drain()
    bench.snapshots.prune("a", keep_nothing.choose)

    assert bench.status("b", 0).state is OperationState.DONE
    assert _state(worker, "b", 1) == _straight(bench, worker, "straight", *_steps(1, 2))
    assert [snapshot.seq for snapshot in bench.snapshots.all("a")] == [8]


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_load_is_recovered_exactly_though_its_checkpoint_was_overwritten_and_deleted(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker(snapshot_every_ops=1000)
    bench.adapter("a")
    _submit(bench, *_steps(1), save("x"), *_steps(2), load("x", with_optimizer=True), forward_backward(7))
    worker.drain()
    expected = _state(worker, "a", 8)
    path = "tinker://a/weights/x"
    with bench.database.transaction() as transaction:
        transaction.execute("DELETE FROM checkpoint WHERE path = ?", (path,))
    _submit(bench, Request(kind=OperationKind.SAVE_WEIGHTS, name="x"), begin=8)
    worker.drain()

    heir = make_worker()

    assert _state(heir, "a", 9) == expected
    assert [snapshot.seq for snapshot in bench.snapshots.all("a") if snapshot.is_start] == [6]


def _die() -> None:
    raise Killed
