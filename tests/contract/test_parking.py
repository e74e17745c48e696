"""Adapters of clients that have gone are parked: in the object store only, lost never, back with the next operation."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.operations import forward_backward, optim_step, replayed, submit_run
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.cli.operator.runs import list_runs, pin_run
from twinkle.core.errors import NotFound
from twinkle.core.settings import Settings
from twinkle.scheduler.retention import Retention

SILENT_S = 300.0


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    """Workers that take no snapshot of their own accord and never lose their lease."""
    return partial(make_worker, snapshot_every_ops=1000, session_timeout_s=SILENT_S, lease_s=1e9)


def _heartbeat(bench: Bench, tenant: str = "t0") -> None:
    with bench.database.transaction() as transaction:
        transaction.execute(
            "UPDATE session SET heartbeat_at = ? WHERE id = ?", (bench.clock.now(), f"session-{tenant}")
        )


def _parked(bench: Bench) -> list[object]:
    return [row[0] for row in bench.rows("SELECT id FROM adapter WHERE parked_at IS NOT NULL ORDER BY id")]


def _is_in_memory(worker: WorkerRig, adapter: str) -> bool:
    return adapter in worker.residents.used(within_s=1e12)


@pytest.mark.parametrize("window", [0, 1], ids=["between_steps", "with_open_gradients"])
@pytest.mark.parametrize("max_resident", [1, 8], ids=["in_host_memory", "on_the_device"])
def test_a_silent_sessions_adapters_are_stored_and_evicted_and_come_back_with_the_next_operation(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, window: int, max_resident: int
) -> None:
    requests = [forward_backward(1), optim_step(), *[forward_backward(2)] * window]
    runs = {adapter: submit_run(bench, *requests, adapter=adapter) for adapter in "ab"}
    _heartbeat(bench)
    worker = make_worker(max_resident=max_resident, parked_bytes=1 << 20)
    _heartbeat(bench)
    worker.drain()
    before = _parked(bench)
    clock.move(SILENT_S + 1)
    worker.drain()

    after = _parked(bench)
    in_memory = [adapter for adapter in "ab" if _is_in_memory(worker, adapter)]
    bench.append(optim_step().numbered("a", len(runs["a"])))
    worker.drain()

    assert (before, after, in_memory) == ([], ["a", "b"], [])
    assert _parked(bench) == ["b"]
    truth, _ = replayed([*runs["a"], optim_step()])
    state = worker.state_before("a", len(runs["a"]) + 1)
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)
    assert [mesh.num_parked for mesh in bench.meshes.census()] == [1]


def test_who_is_heard_of_or_waits_for_something_is_not_parked(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()
    _heartbeat(bench)
    worker.drain()
    for _ in range(5):
        clock.move(SILENT_S - 1)
        _heartbeat(bench)
        worker.drain()

    assert _parked(bench) == []
    assert _is_in_memory(worker, "a")


def test_while_the_object_store_is_away_nothing_leaves_memory(
    bench: Bench, store: BreakableBlobs, make_worker: MakeWorker, clock: HandClock
) -> None:
    submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()
    _heartbeat(bench)
    worker.drain()
    store.refuse("put", "snapshots", 10)
    clock.move(SILENT_S + 1)
    worker.drain()
    while_away = (_parked(bench), _is_in_memory(worker, "a"))
    store.heal()
    clock.move(10)
    worker.drain()

    assert while_away == ([], True)
    assert (_parked(bench), _is_in_memory(worker, "a")) == (["a"], False)


def test_what_a_dead_worker_had_is_parked_by_its_heir_and_its_payloads_need_not_stay(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), optim_step())
    worker = make_worker(lease_s=15.0)
    worker.drain(4)
    worker.journal.after_commit = _die
    with suppress(Killed):
        worker.drain()

    heir = make_worker()
    heir.drain()
    clock.move(1)
    bench.snapshots.prune("a", Retention(keep_s=1.0, every_ops=1, max_snapshots=2).choose)

    assert _parked(bench) == ["a"]
    assert bench.rows("SELECT seq FROM operation WHERE kind = 'forward_backward' AND payload IS NOT NULL") == []
    truth, _ = replayed(run)
    state = make_worker().state_before("a", len(run))
    assert (state.applied, state.steps) == (truth.applied, truth.steps)


def _die() -> None:
    raise Killed


def test_a_pinned_adapter_is_not_parked_with_its_session_and_is_shown_as_pinned(
    bench: Bench, make_worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    for adapter in "ab":
        submit_run(bench, forward_backward(1), optim_step(), adapter=adapter)
    settings = Settings(database_url=bench.url)
    worker = make_worker()
    worker.drain()

    pin_run(settings, "a", is_pinned=True)
    bench.clock.move(2 * SILENT_S)
    worker.drain()

    assert _parked(bench) == ["b"]
    capsys.readouterr()
    list_runs(settings, limit=10, as_json=True)
    assert {row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)} == {"a": "pinned", "b": "parked"}

    pin_run(settings, "a", is_pinned=False)
    bench.clock.move(2 * SILENT_S)
    worker.drain()

    assert _parked(bench) == ["a", "b"]
    with pytest.raises(NotFound):
        pin_run(settings, "nobody", is_pinned=True)
