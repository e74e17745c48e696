"""Blobs that nothing refers to are deleted, a while after; those that something still needs never are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, submission
from harness.operations import create, forward_backward, optim_step, replayed, save
from harness.worker import WorkerRig
from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import OperationKind
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import FolderStore
from twinkle.storage.checkpoints.checkpoints import NewCopy
from twinkle.storage.upkeep.waste import Waste, doom

GRACE_S = 3600.0
WEEK_S = 7 * 24 * 3600.0
KEEP_A_WEEK = Retention(keep_s=WEEK_S, every_ops=4, max_snapshots=8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def worker(bench: Bench, root: Path, clock: HandClock) -> Iterator[WorkerRig]:
    clock.move(1000)
    worker = WorkerRig(
        "w",
        stores=bench.stores,
        blobs=FolderStore(root),
        clock=clock,
        snapshot_every_ops=4,
        retention=KEEP_A_WEEK,
        lease_s=1e9,
    )
    yield worker
    worker.bury()


@pytest.fixture
def waste(bench: Bench, clock: HandClock) -> Waste:
    return bench.stores.waste


def _files(root: Path, folder: str) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in (root / folder).rglob("*") if path.is_file())


def _save_over(bench: Bench, worker: WorkerRig, seq: int) -> None:
    body = b'{"path": "x", "overwrite": true, "model_id": "a", "seq_id": %d}' % seq
    bench.append(submission("a", seq, OperationKind.SAVE_WEIGHTS, body=body))
    worker.drain()
    assert bench.status("a", seq).failure is None


def _saved_twice(bench: Bench, worker: WorkerRig) -> None:
    bench.adapter("a")
    requests = (save("x"), forward_backward(1), optim_step())
    bench.append(*(request.numbered("a", seq) for seq, request in enumerate(requests, start=1)))
    worker.drain()
    _save_over(bench, worker, 4)


def test_an_overwritten_checkpoints_files_go_once_nobody_can_be_reading_them(
    bench: Bench, worker: WorkerRig, waste: Waste, root: Path, clock: HandClock
) -> None:
    _saved_twice(bench, worker)
    both = _files(root, "checkpoints")

    at_once = waste.delete(FolderStore(root), older_than_s=GRACE_S)
    clock.move(GRACE_S)
    later = [waste.delete(FolderStore(root), older_than_s=GRACE_S) for _ in range(2)]

    assert (at_once, later) == (0, [1, 0])
    assert _files(root, "checkpoints") == [key for key in both if "/x/4/" in key]
    assert bench.checkpoints.find("tinker://a/weights/x").seq == 4


def test_files_that_a_copy_has_stay_until_the_copy_goes(
    bench: Bench, worker: WorkerRig, waste: Waste, root: Path, clock: HandClock
) -> None:
    bench.adapter("a")
    bench.append(save("x").numbered("a", 1), forward_backward(1).numbered("a", 2), optim_step().numbered("a", 3))
    worker.drain()
    new = NewCopy(
        source="tinker://a/weights/x", tenant="t0", session="session-t0", adapter="session-t0:train:9", expires_at=None
    )
    copy = bench.checkpoints.copy(new)
    _save_over(bench, worker, 4)
    clock.move(GRACE_S)

    while_copied = waste.delete(FolderStore(root), older_than_s=GRACE_S)
    bench.checkpoints.delete("t0", copy)
    clock.move(GRACE_S)
    after = waste.delete(FolderStore(root), older_than_s=GRACE_S)

    assert (while_copied, after) == (0, 1)
    assert [key for key in _files(root, "checkpoints") if "/x/4/" not in key] == []


def test_a_store_that_does_not_answer_loses_nothing_of_what_is_to_go(
    bench: Bench, worker: WorkerRig, waste: Waste, root: Path, clock: HandClock
) -> None:
    _saved_twice(bench, worker)
    clock.move(GRACE_S)

    class Away(FolderStore):
        def delete(self, key: str) -> None:
            raise StorageUnavailable(key)

    with pytest.raises(StorageUnavailable):
        waste.delete(Away(root), older_than_s=GRACE_S)

    assert waste.delete(FolderStore(root), older_than_s=GRACE_S) == 1


class RefusesOne(FolderStore):
    """A store that will not delete one blob: for ever, or so that nobody knows why."""

    def __init__(self, root: Path, refused: str, cause: OSError) -> None:
        super().__init__(root)
        self._refused = refused
        self._cause = cause

    def delete(self, key: str) -> None:
        if key == self._refused:
            raise StorageUnavailable(key) from self._cause
        super().delete(key)


@pytest.mark.parametrize("cause", [PermissionError("held by a rule of the bucket"), OSError("no answer")], ids=repr)
def test_a_blob_that_a_store_will_not_delete_keeps_no_others(
    bench: Bench, waste: Waste, root: Path, clock: HandClock, cause: OSError
) -> None:
    store = RefusesOne(root, "results/0", cause)
    for number in range(4):
        store.put(f"results/{number}", b"x")
        with bench.database.transaction() as transaction:
            doom(transaction, [f"results/{number}"], now=clock.now())
        clock.move(1)
    clock.move(GRACE_S)

    for _ in range(2):
        with pytest.raises(StorageUnavailable):
            waste.delete(store, older_than_s=GRACE_S)

    assert _files(root, "results") == ["results/0"]
    assert bench.rows("SELECT key FROM doomed_blob") == [("results/0",)]
    assert waste.delete(FolderStore(root), older_than_s=GRACE_S) == 1


def test_a_snapshot_that_a_worker_taken_for_dead_brings_late_is_not_deleted_with_the_one_it_is_the_same_as(
    bench: Bench, worker: WorkerRig, waste: Waste, root: Path, clock: HandClock
) -> None:
    """Two workers came to the same state, and the one's copy was given up before the other's was published."""
    bench.adapter("a")
    first, late = (worker.snapshots._stored("a", 1, b"the same", is_start=False) for _ in range(2))
    bench.snapshots.add(first)
    bench.snapshots.add(worker.snapshots._stored("a", 2, b"the next", is_start=False))
    bench.snapshots.prune("a", KEEP_A_WEEK.choose)
    bench.snapshots.add(late)

    clock.move(GRACE_S)
    num_deleted = waste.delete(FolderStore(root), older_than_s=GRACE_S)

    found = bench.snapshots.nearest("a", at=1)
    assert found is not None and num_deleted == 1
    assert FolderStore(root).get(found.blob) == b"the same"


def test_after_its_time_a_run_keeps_one_snapshot_and_what_is_left_of_it_can_still_be_rebuilt(
    bench: Bench, worker: WorkerRig, waste: Waste, root: Path, clock: HandClock
) -> None:
    run = [create(), *(request for step in range(10) for request in (forward_backward(step), optim_step(float(step))))]
    bench.adapter("a")
    bench.append(*(request.numbered("a", seq) for seq, request in enumerate(run) if seq > 0))
    worker.drain()
    worker.save_all()
    before = bench.snapshots.cost("a")
    clock.move(WEEK_S + 1)
    tail = [forward_backward(77), optim_step(77.0), forward_backward(78)]
    bench.append(*(request.numbered("a", len(run) + place) for place, request in enumerate(tail)))
    worker.drain()

    due = bench.snapshots.runs_to_prune(older_than_s=WEEK_S)
    bench.snapshots.prune("a", KEEP_A_WEEK.choose)
    again = bench.snapshots.runs_to_prune(older_than_s=WEEK_S)
    clock.move(GRACE_S)
    waste.delete(FolderStore(root), older_than_s=GRACE_S)

    after = bench.snapshots.cost("a")
    truth, _ = replayed([*run, *tail])
    rebuilt = worker.transfers.at_once(worker.replay.state_after("a", len(run) + len(tail) - 1))
    assert (due, again) == (["a"], [])
    assert before.floor_seq == -1 and before.num_payloads == len(run)
    assert after.floor_seq == len(run) - 1
    assert rebuilt.num_replayed == len(tail)
    assert (rebuilt.state.applied, rebuilt.state.pending) == (truth.applied, truth.pending)
    assert after.payload_bytes < before.payload_bytes
    assert len(_files(root, "snapshots")) == after.num_snapshots == 1
