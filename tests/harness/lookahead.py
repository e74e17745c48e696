"""What tests of a worker that looks ahead ask of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from harness.journal import Bench
from harness.operations import Request, forward_backward, optim_step, replayed
from harness.worker import Killed, WorkerRig
from twinkle.storage.stores import Stores

WAIT_S = 60.0
STEPS = (forward_backward(1), optim_step(), forward_backward(2), optim_step(), forward_backward(3), optim_step())


def assert_as_one_by_one(worker: WorkerRig, bench: Bench, run: list[Request | None], adapter: str = "a") -> None:
    truth, outcomes = replayed(run)
    for seq, (code, _) in enumerate(outcomes):
        status = bench.status(adapter, seq)
        assert (status.failure.code if status.failure else status.state.value) == code, seq
    state = worker.state_before(adapter, len(run))
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)


def once_in_a_pass(worker: WorkerRig, act: Callable[[], None], *, nth: int = 1) -> None:
    """Do something while the device is at its nth call."""
    run_passes = worker.engine.run_passes
    calls: list[int] = []

    def acting(passes):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == nth:
            act()
        return run_passes(passes)

    worker.engine.run_passes = acting  # type: ignore[method-assign]


def column(stores: Stores, column: str, seqs: range) -> list[object]:
    ids = [f"a:req:{seq}" for seq in seqs]
    rows = stores.database.read(
        f"SELECT request_id, {column} AS value FROM operation WHERE lane = 'a' ORDER BY seq", ()
    )
    found = {row.request_id: row.value for row in rows}
    return [found[name] for name in ids]


def die() -> None:
    raise Killed


def assert_soon(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
