"""What goes to the object store or comes from it holds nobody else up; what is replayed lets others go first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_sampler, submission
from harness.operations import (
    Request,
    forward_backward,
    load,
    optim_step,
    sample_body,
    save,
    save_for_sampler,
    submit_run,
)
from harness.polling import wait_until
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.core.operation import OperationKind, OperationState, Payload
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import FolderStore
from twinkle.workers.steps import Job, Transfers, turn

NUM_SAVES = 8


class GatedBlobs(BreakableBlobs):
    """An object store whose answers for some keys are held back until they are let go, one by one or all."""

    def __init__(self, store: FolderStore) -> None:
        super().__init__(store)
        self._held: dict[str, threading.Semaphore] = {}
        self.waiting: list[str] = []

    def hold(self, part: str) -> None:
        """Hold back what has this in its key."""
        self._held[part] = threading.Semaphore(0)

    def let_go(self, times: int = 10_000) -> None:
        for gate in self._held.values():
            gate.release(times)

    def hold_no_more(self) -> Callable[[], None]:
        """Hold nothing new back; what lets go of the rest."""
        gates, self._held = list(self._held.values()), {}
        return lambda: [gate.release(10_000) for gate in gates] and None

    def put(self, key: str, data: bytes) -> None:
        self._pass(key)
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._pass(key)
        return super().get(key)

    def _pass(self, key: str) -> None:
        gates = [gate for part, gate in self._held.items() if part in key]
        if gates:
            self.waiting.append(key)
            assert gates[0].acquire(timeout=30)


@pytest.fixture
def store(tmp_path) -> GatedBlobs:  # type: ignore[no-untyped-def]
    return GatedBlobs(FolderStore(tmp_path / "objects"))


@pytest.fixture
def make_threaded(make_worker: MakeWorker, store: GatedBlobs) -> Iterator[MakeWorker]:
    """Workers with threads of their own, which end with the test whatever is held back."""

    def make(**options) -> WorkerRig:  # type: ignore[no-untyped-def]
        return make_worker(threads=ThreadPoolExecutor(8), **options)

    yield make
    store.let_go()


@contextmanager
def draining(worker: WorkerRig) -> Iterator[None]:
    """The worker at work beside the test, until nothing is left."""
    thread = threading.Thread(target=worker.drain)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
        assert not thread.is_alive()


def _is_done(bench: Bench, lane: str, seq: int) -> bool:
    return bench.status(lane, seq).state is OperationState.DONE


def _runs(bench: Bench, *requests, names) -> list[str]:  # type: ignore[no-untyped-def]
    for name in names:
        submit_run(bench, *requests, adapter=name)
    return list(names)


def test_eight_saves_on_their_way_hold_up_nobody_elses_passes(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    savers = _runs(bench, save("x"), forward_backward(1), names=[f"saver{number}" for number in range(NUM_SAVES)])
    others = _runs(bench, forward_backward(1), optim_step(), forward_backward(2), names=["one", "two"])
    store.hold("checkpoints")
    worker = make_threaded(max_adapters=16, max_resident=32)

    with draining(worker):
        wait_until(lambda: all(_is_done(bench, name, 3) for name in others), what="the others are done")
        assert all(bench.status(name, 1).state is OperationState.RUNNING for name in savers)
        assert all(bench.status(name, 2).state is OperationState.QUEUED for name in savers), "order per adapter"
        store.let_go()

    assert all(_is_done(bench, name, seq) for name in savers for seq in (1, 2))
    assert all(bench.status(name, 1).attempt == 1 for name in savers)


def test_each_save_is_committed_when_it_is_stored_and_not_with_the_slowest(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    _runs(bench, save("x"), names=["a", "b"])
    _runs(bench, optim_step(), names=["c"])
    store.hold("/a/weights/")
    worker = make_threaded()

    with draining(worker):
        wait_until(lambda: _is_done(bench, "c", 1), what="the step beside the saves is committed")
        wait_until(lambda: _is_done(bench, "b", 1), what="the quick save is committed")
        assert not _is_done(bench, "a", 1)
        store.let_go()

    assert _is_done(bench, "a", 1) and _is_done(bench, "b", 1)


@pytest.mark.parametrize("what", ["a load", "a payload", "a result", "a restore", "a sampler's weights"])
def test_whatever_is_read_or_written_holds_up_nobody_else(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs, what: str
) -> None:
    folder, lane, seq = "checkpoints", "a", 2
    if what == "a load":
        submit_run(bench, save("x"), adapter="a")
        make_threaded().drain()
        bench.append(load("x").numbered("a", 2))
    elif what == "a restore":
        submit_run(bench, forward_backward(1), optim_step(), adapter="a")
        former = make_threaded(snapshot_every_ops=1)
        former.drain()
        former.settle()
        folder, seq = "snapshots", 3
        bench.append(forward_backward(1).numbered("a", 3))
    elif what == "a result":
        folder, seq = "a/req/1", 1
        submit_run(bench, forward_backward(1), adapter="a")
    elif what == "a payload":
        folder, seq = "payloads", 1
        submit_run(bench, adapter="a")
        body = forward_backward(1).numbered("a", 1)
        store.put("payloads/x", body.payload.inline or b"")
        bench.append(_with_blob(body, "payloads/x"))
    else:
        submit_run(bench, save("x"), adapter="a")
        bench.append(forward_backward(1).numbered("a", 2))
        make_threaded().drain()
        lane, seq = "session-t0:sample:0", 0
        files = bench.checkpoints.find("tinker://a/weights/x")
        bench.journal.open_lane(new_sampler(lane, checkpoint=files))
        bench.append(submission(lane, 0, OperationKind.SAMPLE, body=sample_body(lane, 0)))
    _runs(bench, optim_step(), optim_step(), names=["other"])
    store.hold(folder)
    worker = make_threaded(inline_bytes=1 if what == "a result" else 1 << 16)

    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="it is on its way")
        wait_until(lambda: _is_done(bench, "other", 2), what="the other goes on")
        wait_until(lambda: bench.status(lane, seq).state is OperationState.RUNNING, what="it is under way")
        assert not _is_done(bench, lane, seq)
        store.let_go()

    assert _is_done(bench, lane, seq) and _is_done(bench, "other", 2)


def test_what_a_worker_had_on_its_way_when_it_lost_the_mesh_is_dropped(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), save("x"), forward_backward(2))
    store.hold("checkpoints")
    zombie = make_threaded()
    with draining(zombie):
        wait_until(lambda: bool(store.waiting), what="the save is on its way")
        let_go = store.hold_no_more()
        thief = make_threaded()
        thief.drain()
        assert all(_is_done(bench, "a", seq) for seq in range(len(run)))
        before = bench.rows("SELECT * FROM operation ORDER BY seq"), bench.rows("SELECT path, files FROM checkpoint")
        let_go()

    after = bench.rows("SELECT * FROM operation ORDER BY seq"), bench.rows("SELECT path, files FROM checkpoint")
    assert after == before
    assert zombie.keeper.current() is None


def test_a_closing_worker_finishes_what_is_on_its_way(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    submit_run(bench, save("x"))
    store.hold("checkpoints")
    worker = make_threaded()
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="the save is on its way")
        closing = threading.Thread(target=worker.worker.close)
        closing.start()
        store.let_go()
        closing.join(30)

    assert _is_done(bench, "a", 1)


def test_a_closing_worker_gives_back_blamelessly_what_does_not_end(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinkle.workers.run._FINISH_S", 0.1)
    submit_run(bench, save("x"))
    store.hold("checkpoints")
    worker = make_threaded()
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="the save is on its way")
        worker.worker.close()

    assert bench.rows("SELECT state, attempts, suspicions FROM operation WHERE kind = 'save_weights'") == [
        ("queued", 0, 0)
    ]


def test_no_more_leaves_the_device_than_may_be_on_its_way(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    names = _runs(bench, save("x"), names=[f"saver{number}" for number in range(NUM_SAVES)])
    store.hold("checkpoints")
    worker = make_threaded(max_adapters=16, max_resident=32, transfer_bytes=1)
    exports: list[int] = []
    export = worker.engine.export

    def counted(state, *, with_optimizer):  # type: ignore[no-untyped-def]
        exports.append(worker.transfers.num_bytes)
        return export(state, with_optimizer=with_optimizer)

    worker.engine.export = counted  # type: ignore[method-assign]
    with draining(worker):
        wait_until(lambda: len(store.waiting) == 1, what="the first is on its way")
        store.let_go()

    assert exports == [0] * NUM_SAVES
    assert all(_is_done(bench, name, 1) for name in names)


def test_a_worker_that_only_waits_for_the_store_does_not_ask_the_journal_again_and_again(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    submit_run(bench, save("x"))
    store.hold("checkpoints")
    worker = make_threaded()
    claims: list[int] = []
    claim = worker.journal.claim

    def counted(*args, **options):  # type: ignore[no-untyped-def]
        claims.append(1)
        return claim(*args, **options)

    worker.journal.claim = counted  # type: ignore[method-assign]
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="the save is on its way")
        submit_run(bench, adapter="b")
        worker.worker.ring()
        wait_until(lambda: _is_done(bench, "b", 0), what="what came meanwhile is done")
        store.let_go()

    assert len(claims) < 20


def test_a_late_snapshot_holds_up_its_own_adapter_and_no_other(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    submit_run(bench, *(optim_step() for _ in range(8)), adapter="a")
    submit_run(bench, *(optim_step() for _ in range(8)), adapter="b")
    store.hold("snapshots")
    worker = make_threaded(snapshot_every_ops=3)
    with draining(worker):
        wait_until(lambda: len(worker.residents.held) == 2, what="both wait for a snapshot")
        submit_run(bench, optim_step(), adapter="c")
        worker.worker.ring()
        wait_until(lambda: _is_done(bench, "c", 1), what="a third one goes on")
        assert not _is_done(bench, "a", 8)
        store.let_go()

    assert _is_done(bench, "a", 8) and _is_done(bench, "b", 8)


def test_others_go_first_between_the_operations_of_a_replay(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    """A restore that takes long: what comes for another adapter is done before it has ended."""
    submit_run(bench, *(forward_backward(number) for number in range(1, 41)), adapter="long")
    make_worker(snapshot_every_ops=10_000).drain()
    bench.append(optim_step().numbered("long", 41))
    worker = make_worker(snapshot_every_ops=10_000)
    order: list[str] = []
    run_passes = worker.engine.run_passes

    def slowly(passes):  # type: ignore[no-untyped-def]
        order.extend(item.body.model_id for item in passes)
        if len(order) == 5:
            submit_run(bench, forward_backward(1), adapter="short")
        clock.move(0.05)
        return run_passes(passes)

    worker.engine.run_passes = slowly  # type: ignore[method-assign]
    worker.drain()

    assert order.count("long") == 40
    assert 5 <= order.index("short") <= 12
    assert _is_done(bench, "long", 41) and _is_done(bench, "short", 1)


def _used_for_long(bench: Bench, former: WorkerRig, clock: HandClock, *, steps: Sequence[Request]) -> None:
    """Nameless weights of a run that has gone on since, old enough to get a recovery point of their own."""
    submit_run(bench, *steps, save_for_sampler(), *steps, adapter="long")
    former.drain()
    former.worker.close()
    clock.move(7200)


def test_others_go_first_while_weights_that_are_used_for_long_get_a_recovery_point(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    steps = [forward_backward(number) for number in range(1, 41)]
    _used_for_long(bench, make_worker(snapshot_every_ops=10_000), clock, steps=steps)
    worker = make_worker(snapshot_every_ops=10_000, pin_after_s=7200.0)
    order: list[str] = []
    run_passes = worker.engine.run_passes

    def slowly(passes):  # type: ignore[no-untyped-def]
        order.extend(item.body.model_id for item in passes)
        if len(order) == 5:
            submit_run(bench, forward_backward(1), adapter="short")
        return run_passes(passes)

    worker.engine.run_passes = slowly  # type: ignore[method-assign]
    worker.drain()

    assert order.count("long") == 40
    assert 5 <= order.index("short") <= 12
    assert _is_done(bench, "short", 1)
    assert bench.rows("SELECT pinned FROM ephemeral_weights") == [(True,)]


def test_nobody_waits_for_the_store_while_weights_get_a_recovery_point(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs, clock: HandClock
) -> None:
    former = make_threaded(snapshot_every_ops=3, retention=Retention(keep_s=1e12, every_ops=1, max_snapshots=9))
    _used_for_long(bench, former, clock, steps=[optim_step()] * 3)
    store.hold("snapshots")
    worker = make_threaded(pin_after_s=7200.0)
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="a recovery point of the run is being read")
        submit_run(bench, forward_backward(1), adapter="short")
        worker.worker.ring()
        wait_until(lambda: _is_done(bench, "short", 1), what="another one goes on")
        assert bench.rows("SELECT pinned FROM ephemeral_weights") == [(False,)]
        store.let_go()
    worker.settle()

    assert bench.rows("SELECT pinned FROM ephemeral_weights") == [(True,)]


def test_weights_that_several_samples_wait_for_are_read_once(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    submit_run(bench, save("x"), adapter="a")
    make_threaded().drain()
    lane = "session-t0:sample:0"
    bench.journal.open_lane(new_sampler(lane, checkpoint=bench.checkpoints.find("tinker://a/weights/x")))
    for seq in range(3):
        bench.append(submission(lane, seq, OperationKind.SAMPLE, body=sample_body(lane, seq)))
    store.hold("checkpoints")
    worker = make_threaded()
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="they are being read")
        wait_until(
            lambda: all(bench.status(lane, seq).state is OperationState.RUNNING for seq in range(3)), what="all begun"
        )
        store.let_go()

    assert len(store.waiting) == 1
    assert all(_is_done(bench, lane, seq) for seq in range(3))


def test_an_operation_ends_while_a_closing_worker_snapshots_the_other_adapters(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    submit_run(bench, optim_step(), adapter="idle")
    worker = make_threaded(snapshot_every_ops=1000)
    worker.drain()
    submit_run(bench, save("x"), adapter="saving")
    store.hold("checkpoints")
    with draining(worker):
        wait_until(lambda: bool(store.waiting), what="the save is on its way")
        let_save_go = store.hold_no_more()
        store.hold("snapshots")
        closing = threading.Thread(target=worker.worker.close)
        closing.start()
        wait_until(lambda: any("/idle/" in key for key in store.waiting), what="the idle one's snapshot is on its way")
        assert not _is_done(bench, "saving", 1)
        let_save_go()
        wait_until(lambda: _is_done(bench, "saving", 1), what="the save is done beside it")
        assert bench.snapshots.all("idle") == []
        store.let_go()
        closing.join(30)

    assert [snapshot.seq for name in ("idle", "saving") for snapshot in bench.snapshots.all(name)] == [1, 1]


def test_a_closing_worker_takes_no_more_off_the_device_than_may_be_on_its_way(
    bench: Bench, make_threaded: MakeWorker
) -> None:
    names = _runs(bench, optim_step(), names=["a", "b", "c"])
    worker = make_threaded(snapshot_every_ops=1000, transfer_bytes=1)
    worker.drain()
    on_their_way: list[int] = []
    snapshot = worker.engine.snapshot

    def counted(state):  # type: ignore[no-untyped-def]
        on_their_way.append(worker.transfers.num_bytes)
        return snapshot(state)

    worker.engine.snapshot = counted  # type: ignore[method-assign]
    worker.worker.close()

    assert on_their_way == [0, 0, 0]
    assert [len(bench.snapshots.all(name)) for name in names] == [1, 1, 1]


def test_a_worker_killed_with_a_save_on_its_way_leaves_it_to_the_next(
    bench: Bench, make_threaded: MakeWorker, store: GatedBlobs
) -> None:
    run = submit_run(bench, optim_step(), save("x"), optim_step())
    victim = make_threaded()
    victim.drain(2)
    victim.journal.before_commit = _die
    with suppress(Killed):
        victim.drain()

    make_threaded().drain()

    assert all(_is_done(bench, "a", seq) for seq in range(len(run)))


def test_steps_wait_and_go_on_and_end_with_what_they_came_to() -> None:
    with ThreadPoolExecutor(1) as threads:
        transfers = Transfers(threads, max_bytes=10)
        gate = threading.Event()

        def steps():  # type: ignore[no-untyped-def]
            yield turn
            return (yield from transfers.away(lambda: gate.wait(30), num_bytes=7)) and "done"

        job = Job(steps())
        job.go_on()
        assert job.can_go_on
        job.go_on()
        assert not job.can_go_on and transfers.num_bytes == 7
        transfers.changed.clear()
        gate.set()
        assert transfers.changed.wait(30)
        wait_until(lambda: job.can_go_on, what="the transfer has ended")
        job.go_on()

        assert (job.has_ended, job.result, transfers.num_bytes) == (True, "done", 0)


def _with_blob(body, key: str):  # type: ignore[no-untyped-def]
    return replace(body, payload=Payload(blob=key, blob_bytes=body.payload.size_bytes))


def _die() -> None:
    raise Killed
