"""Recovery points are copied of states that are not committed yet, and written when they are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from harness.journal import Bench
from harness.lookahead import STEPS, WAIT_S, assert_as_one_by_one, column, once_in_a_pass
from harness.operations import create, replayed, submit_run
from harness.polling import wait_until
from harness.worker import MakeWorker, WorkerRig


def test_no_adapter_comes_to_rest_for_a_recovery_point(bench: Bench, make_worker: MakeWorker) -> None:
    """One is due every eighth operation; at each pass the next one is in hand all the same."""
    run = submit_run(bench, *STEPS * 4)
    worker = make_worker(snapshot_every_ops=8)
    seen: list[object] = []
    for nth in range(1, 12):
        next_pass = range(2 * nth + 1, 2 * nth + 2)
        once_in_a_pass(worker, partial(_look, bench, next_pass, seen), nth=nth)

    worker.drain()

    assert seen == ["running"] * 11
    assert _recovery_points(bench) == [24]
    assert_as_one_by_one(worker, bench, run)


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
    seen.extend(column(bench.stores, "state", seqs))


def _recovery_points(bench: Bench) -> list[int]:
    return [row[0] for row in bench.rows("SELECT seq FROM snapshot WHERE adapter = 'a' ORDER BY seq")]
