"""What a crash may undo has the bound that docs/recovery.md states, also while the object store is slow."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench
from harness.operations import Request, create, forward_backward, optim_step, replayed
from harness.worker import BreakableBlobs, Killed, WorkerRig
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.blobs import FolderStore
from twinkle.workers.adapters.replay import Rebuilt

LONG_WINDOW = 60


class SlowBlobs(BreakableBlobs):
    """An object store that takes its time for snapshots; what a dead worker had under way does not arrive."""

    def __init__(self, root: Path, *, put_s: float = 0.02) -> None:
        super().__init__(FolderStore(root))
        self.died = threading.Event()
        self._put_s = put_s

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("snapshots/") and self.died.wait(self._put_s):
            raise StorageUnavailable("its worker died")
        super().put(key, data)


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    """One database is enough here: the contract of both is tested next door."""
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


def _windows(chance: random.Random) -> list[Request]:
    """Steps with windows of very different lengths, one of them longer than anything a snapshot waits for."""
    lengths = [chance.randint(1, 4) for _ in range(12)]
    lengths.insert(6, LONG_WINDOW)
    return [
        request
        for length in lengths
        for request in (*(forward_backward(chance.randint(1, 99)) for _ in range(length)), optim_step())
    ]


@pytest.mark.parametrize(("every_ops", "every_bytes", "seed"), [(5, 1 << 40, 1), (5, 1 << 40, 2), (9999, 250, 3)])
def test_no_crash_undoes_more_than_is_stated(
    bench: Bench, clock: HandClock, tmp_path: Path, every_ops: int, every_bytes: int, seed: int
) -> None:
    chance = random.Random(seed)
    run = [create(), *_windows(chance)]
    bench.adapter("a")
    bench.append(*(request.numbered("a", seq) for seq, request in enumerate(run) if seq > 0))
    sizes = [row[0] for row in bench.rows("SELECT payload_bytes FROM operation WHERE lane = 'a'")]
    rebuilds: list[Rebuilt] = []
    num_done = 0
    while num_done < len(run):
        clock.move(1000)
        blobs = SlowBlobs(tmp_path / "objects")
        worker = WorkerRig(
            f"worker{len(rebuilds)}",
            stores=bench.stores,
            blobs=blobs,
            clock=clock,
            threads=ThreadPoolExecutor(4),
            max_attempts=100,
            snapshot_every_ops=every_ops,
            snapshot_every_bytes=every_bytes,
        )
        worker.drain(chance.randint(1, 40))
        worker.journal.before_commit = _die
        with suppress(Killed):
            worker.drain()
        blobs.died.set()
        worker.bury()
        num_done = bench.lane("a").head_seq
        rebuilds.append(_rebuilt(bench, clock, tmp_path, num_done - 1))

    truth, _ = replayed(run)
    state = rebuilds[-1].state
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)
    assert max(rebuilt.num_replayed for rebuilt in rebuilds) <= 3 * every_ops
    assert max(rebuilt.num_bytes for rebuilt in rebuilds) <= 3 * (every_bytes + max(sizes))
    assert max(rebuilt.num_replayed for rebuilt in rebuilds) > 1, "nothing was tried"


def test_a_worker_waits_for_a_slow_snapshot_before_more_is_at_stake(
    bench: Bench, clock: HandClock, tmp_path: Path
) -> None:
    """At the worst moment: within a long window, just before the second snapshot would be handed over."""
    every_ops = 5
    bench.adapter("a")
    bench.append(*(forward_backward(seq).numbered("a", seq) for seq in range(1, LONG_WINDOW)))
    clock.move(1000)
    blobs = SlowBlobs(tmp_path / "objects", put_s=0.5)
    worker = WorkerRig(
        "w",
        stores=bench.stores,
        blobs=blobs,
        clock=clock,
        snapshot_every_ops=every_ops,
        threads=ThreadPoolExecutor(4),
    )

    worker.drain(4 * every_ops - 1)
    blobs.died.set()
    worker.bury()

    num_done = bench.lane("a").head_seq
    assert num_done >= 4 * every_ops - 2
    assert _rebuilt(bench, clock, tmp_path, num_done - 1).num_replayed <= 3 * every_ops


def _rebuilt(bench: Bench, clock: HandClock, folder: Path, seq: int) -> Rebuilt:
    """What its heir would have to do."""
    store = FolderStore(folder / "objects")
    heir = WorkerRig("heir", stores=bench.stores, blobs=store, clock=clock)
    return heir.transfers.at_once(heir.replay.state_after("a", seq))


def _die() -> None:
    raise Killed
