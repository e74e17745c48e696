"""A state that cannot be copied, written or made anew is its adapter's own trouble: nobody's operation pays for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
from structlog.testing import capture_logs

from harness.clock import HandClock
from harness.journal import MESH, Bench
from harness.operations import Request, forward_backward, optim_step, replayed, save_for_sampler, submit_run
from harness.worker import Killed, MakeWorker, WorkerRig
from twinkle.core.operation import OperationState

OTHER = "mesh1"
SILENT_S = 300.0
BROKEN = RuntimeError("no room on the host")


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    """One database is enough here: nothing of this is the journal's."""
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


def _break(worker: WorkerRig, name: str) -> None:
    def fail(*_: object) -> None:
        raise BROKEN

    setattr(worker.engine, name, fail)


def _break_replays_of(worker: WorkerRig, adapter: str) -> list[str]:
    """Let the passes of an adapter fail in the device; those that were tried."""
    run_passes = worker.engine.run_passes
    tried: list[str] = []

    def fail(passes):  # type: ignore[no-untyped-def]
        if any(item.body.model_id == adapter for item in passes):
            tried.append(adapter)
            raise BROKEN
        return run_passes(passes)

    worker.engine.run_passes = fail  # type: ignore[method-assign]
    return tried


def _die(bench: Bench, worker: WorkerRig, requests: list[Request], adapters: str) -> None:
    """A worker that has done it all dies with it."""
    for adapter in adapters:
        submit_run(bench, *requests, adapter=adapter)
    worker.drain()
    worker.journal.before_commit = _killed
    submit_run(bench, adapter="last")
    with suppress(Killed):
        worker.drain()


def _killed() -> None:
    raise Killed


def _assert_as_one_by_one(bench: Bench, worker: WorkerRig, runs: dict[str, list[Request | None]]) -> None:
    for adapter, run in runs.items():
        statuses = [bench.status(adapter, seq) for seq in range(len(run))]
        assert [(status.state, status.attempt) for status in statuses] == [(OperationState.DONE, 1)] * len(run)
        truth, _ = replayed(run)
        state = worker.state_before(adapter, len(run))
        assert (state.applied, state.steps) == (truth.applied, truth.steps)


def test_a_recovery_point_that_cannot_be_copied_costs_no_operation_anything(
    bench: Bench, make_worker: MakeWorker
) -> None:
    steps = [forward_backward(1), optim_step()] * 6
    runs = {adapter: submit_run(bench, *steps, adapter=adapter) for adapter in "ab"}
    worker = make_worker(snapshot_every_ops=3)
    copy_state = worker.engine.copy_state
    _break(worker, "copy_state")

    with capture_logs() as lines:
        worker.drain()
        worker.settle()

    _assert_as_one_by_one(bench, worker, runs)
    failed = [line for line in lines if line["event"] == "snapshot.failed"]
    assert {line["adapter"] for line in failed} == {"a", "b"}
    assert all(line["exc_info"] is BROKEN for line in failed)
    assert bench.snapshots.nearest("a", at=len(runs["a"])) is None
    worker.engine.copy_state = copy_state  # type: ignore[method-assign]
    worker.worker.close()
    assert [bench.snapshots.nearest(adapter, at=100).seq for adapter in runs] == [12, 12]  # type: ignore[union-attr]


def test_an_adapter_that_cannot_be_parked_leaves_all_the_same_and_is_made_anew(
    bench: Bench, make_worker: MakeWorker
) -> None:
    steps = [forward_backward(1), optim_step()] * 2
    runs = {adapter: submit_run(bench, *steps, adapter=adapter) for adapter in "abcd"}
    worker = make_worker(max_adapters=1, max_resident=2, parked_bytes=1 << 20, snapshot_every_ops=1000)
    _break(worker, "snapshot")

    with capture_logs() as lines:
        worker.drain()

    _assert_as_one_by_one(bench, worker, runs)
    left = [line for line in lines if line["event"] == "adapter.not_copied"]
    assert left and all(line["log_level"] == "error" and line["exc_info"] is BROKEN for line in left)


def _parked(bench: Bench) -> list[str]:
    return [row.id for row in bench.rows("SELECT id FROM adapter WHERE parked_at IS NOT NULL ORDER BY id")]


def test_an_adapter_that_cannot_be_made_anew_keeps_no_other_from_being_parked_and_is_tried_again_ever_later(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    make_worker = partial(make_worker, snapshot_every_ops=1000, session_timeout_s=SILENT_S)
    _die(bench, make_worker(), [forward_backward(1), optim_step()], "ab")
    heir = make_worker(lease_s=1e9)
    run_passes = heir.engine.run_passes
    tried = _break_replays_of(heir, "a")
    tried_at: list[int] = []

    with capture_logs() as lines:
        for minute in range(5, 5 * 60, 5):
            clock.move(300.0)
            before = len(tried)
            heir.drain()
            tried_at += [minute] * (len(tried) - before)

    assert _parked(bench) == ["b", "last"]
    assert tried_at == [5, 10, 20, 40, 80, 140, 200, 260], "nobody tries again and again"
    told = [line for line in lines if line["event"] == "adapter.not_parked"]
    assert all((line["adapter"], line["log_level"], line["exc_info"]) == ("a", "error", BROKEN) for line in told)
    assert [line["failures"] for line in told] == list(range(1, 9))
    assert [told[0]["next"], told[-1]["next"]] == [
        f"it is left as it is, and tried again in {pause} s" for pause in (300, 3600)
    ]

    heir.engine.run_passes = run_passes  # type: ignore[method-assign]
    clock.move(3600.0)
    heir.drain()
    assert _parked(bench) == ["a", "b", "last"]


def test_an_adapter_that_cannot_be_made_anew_here_moves_with_the_others_and_is_made_there(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    make_worker = partial(make_worker, snapshot_every_ops=1000, lease_s=1e9)
    there = make_worker(mesh=OTHER)
    there.drain()
    _die(bench, make_worker(lease_s=15.0), steps := [forward_backward(1), optim_step()], "ab")
    here = make_worker(mesh=MESH)
    here.drain()
    _break_replays_of(here, "a")
    for adapter in "ab":
        bench.stores.moves.begin(adapter, OTHER)
        bench.append(optim_step().numbered(adapter, len(steps) + 1))

    for _ in range(3):
        clock.move(2)
        here.drain()
        there.drain()

    assert bench.rows("SELECT id, mesh FROM lane WHERE id IN ('a', 'b') ORDER BY id") == [("a", OTHER), ("b", OTHER)]
    assert all(bench.status(adapter, 3).state is OperationState.DONE for adapter in "ab")


def test_weights_that_cannot_be_made_anew_for_a_recovery_point_disturb_nobody_and_get_one_later(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker(pin_after_s=7200.0, snapshot_every_ops=1000, lease_s=1e9)
    run = submit_run(bench, forward_backward(1), optim_step(), save_for_sampler(), forward_backward(2), optim_step())
    worker.drain()
    run_passes = worker.engine.run_passes
    tried = _break_replays_of(worker, "a")
    clock.move(7200)

    with capture_logs() as lines:
        for _ in range(4):
            worker.drain()
            clock.move(300)

    assert tried == ["a"] * 3
    told = [line for line in lines if line["event"] == "sampler_weights.not_pinned"]
    assert [line["failures"] for line in told] == [1, 2, 3]
    assert all((line["adapter"], line["seq"], line["exc_info"]) == ("a", len(run) - 3, BROKEN) for line in told)
    worker.engine.run_passes = run_passes  # type: ignore[method-assign]
    clock.move(3600)
    worker.drain()
    worker.settle()
    assert bench.snapshots.nearest("a", at=len(run) - 3).seq == len(run) - 3  # type: ignore[union-attr]
