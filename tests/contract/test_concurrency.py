"""Many writers at once: nothing stuck, nothing twice, nothing lost."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from harness.journal import MESH, Bench, done, identity, new_adapter, submission
from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, OperationKind
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.meshes import Meshes
from twinkle.storage.journal.turns import Head
from twinkle.storage.upkeep.upkeep import Upkeep

_LANES = [f"lane{number:02d}" for number in range(12)]
_PER_LANE = 12
_DEADLINE_S = 60.0


def _patiently(write: Callable[[], object]) -> None:
    """As the API and the worker do: a database that breaks a deadlock is asked again."""
    while True:
        try:
            write()
        except StorageUnavailable:
            continue
        return


def _append_everything(url: str, seed: int, lanes: Sequence[str]) -> None:
    """Every operation of the lanes, in batches over several lanes, in an order of its own, some of them twice."""
    journal = Journal(Database(url), SystemClock())
    rng = random.Random(seed)
    pending = [submission(lane, seq) for lane in lanes for seq in range(1, _PER_LANE + 1)]
    pending += rng.sample(pending, len(pending) // 5)
    rng.shuffle(pending)
    while pending:
        batch, pending = pending[:4], pending[4:]

        def append(batch: list[object] = batch) -> None:  # type: ignore[assignment]
            assert all(isinstance(answer, Accepted) for answer in journal.append(batch))  # type: ignore[arg-type]

        _patiently(append)
    journal.database.close()


def _work_until_done(url: str, lease: Lease, seed: int, *, gives_back: bool = True) -> None:
    """Claim some of what is ready, commit most of it and give back the rest, until every lane is at its end."""
    database = Database(url)
    journal = Journal(database, SystemClock())
    rng = random.Random(seed)

    def some(heads: list[Head]) -> list[Head]:
        return rng.sample(heads, k=min(len(heads), rng.randint(1, 6))) if heads else []

    ends_at = time.monotonic() + _DEADLINE_S
    while time.monotonic() < ends_at:
        try:
            claims = journal.claim(lease, with_virtual_time(some), 64)
            kept = [claim for claim in claims if not gives_back or rng.random() < 0.8]
            journal.give_back(lease, [claim.request_id for claim in claims if claim not in kept])
            journal.commit(lease, [done(claim) for claim in kept])
            open_lanes = database.read("SELECT COUNT(*) FROM lane WHERE head_seq <= ?", (_PER_LANE,))
            if open_lanes[0][0] == 0:
                break
        except StorageUnavailable:
            continue
    database.close()


def _assert_complete(bench: Bench) -> None:
    lanes = bench.rows("SELECT id, head_seq, head_kind, max_seq, gap_since FROM lane ORDER BY id")
    assert lanes == [(lane, _PER_LANE + 1, None, _PER_LANE, None) for lane in _LANES]
    rows = bench.rows("SELECT lane, seq, finished_at FROM operation WHERE state = 'done' ORDER BY lane, seq")
    assert [(lane, seq) for lane, seq, _ in rows] == [(lane, seq) for lane in _LANES for seq in range(_PER_LANE + 1)]
    for lane in _LANES:
        times = [float(str(finished_at)) for owner, _, finished_at in rows if owner == lane]
        assert times == sorted(times), lane


@pytest.fixture
def lease(bench: Bench) -> Lease:
    """A lease on the machine's clock, with every lane created."""
    lease = Meshes(bench.database, SystemClock()).acquire(MESH, identity("worker"), lease_s=600)
    assert lease is not None
    bench.created(lease, *_LANES)
    return lease


def test_every_lane_ends_when_many_threads_append_and_one_works(bench: Bench, lease: Lease) -> None:
    errors: list[BaseException] = []
    threads = [
        *(_thread(errors, _append_everything, bench.url, seed, _LANES[seed % 3 :: 3]) for seed in range(6)),
        _thread(errors, _work_until_done, bench.url, lease, 99),
        _thread(errors, _renew_and_sweep, bench.url, lease),
    ]
    for thread in threads:
        thread.start()
    for thread in threads[:-1]:
        thread.join(_DEADLINE_S + 10)
    _swept.set()
    threads[-1].join(10)

    assert errors == []
    _assert_complete(bench)


_swept = threading.Event()


def _renew_and_sweep(url: str, lease: Lease) -> None:
    """What goes on beside the work: renewals, and sweeps that look for something to end."""
    _swept.clear()
    database = Database(url)
    meshes, upkeep = Meshes(database, SystemClock()), Upkeep(database, SystemClock())
    while not _swept.is_set():
        _patiently(lambda: meshes.renew(lease, lease_s=600))
        _patiently(lambda: upkeep.expire_overdue(deadline_s=3600))
        _patiently(lambda: upkeep.close_gaps(older_than_s=3600))
        _patiently(lambda: upkeep.expire_results(older_than_s=3600))
    database.close()


def test_every_lane_ends_when_several_processes_append_and_one_works(bench: Bench, lease: Lease) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_append_everything, args=(bench.url, seed, _LANES[seed::2])) for seed in range(2)
    ]
    for process in processes:
        process.start()
    _work_until_done(bench.url, lease, 99)
    for process in processes:
        process.join(_DEADLINE_S)

    assert [process.exitcode for process in processes] == [0, 0]
    _assert_complete(bench)


def test_one_of_many_threads_that_send_the_same_number_is_the_first(bench: Bench, lease: Lease) -> None:
    answers: list[object] = []
    barrier = threading.Barrier(6)

    def send(body: bytes) -> None:
        barrier.wait()
        answers.extend(bench.journal.append([submission(_LANES[0], 1, body=body)]))
        bench.database.close()

    errors: list[BaseException] = []
    threads = [_thread(errors, send, body) for body in (b"x", b"x", b"x", b"y", b"y", b"y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert errors == []
    tickets = [answer for answer in answers if isinstance(answer, Accepted)]
    assert (len(answers), len(tickets), sum(ticket.is_new for ticket in tickets)) == (6, 3, 1)


def test_one_of_many_threads_that_open_the_same_adapter_creates_it(bench: Bench, lease: Lease) -> None:
    answers: list[Accepted | None] = []
    barrier = threading.Barrier(6)

    def open_it() -> None:
        barrier.wait()
        answers.append(bench.journal.open_lane(new_adapter("new"), submission("new", 0, OperationKind.CREATE_MODEL)))
        bench.database.close()

    errors: list[BaseException] = []
    threads = [_thread(errors, open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert errors == []
    assert sorted(answer.is_new for answer in answers if answer is not None) == [False] * 5 + [True]


def _thread(errors: list[BaseException], target: Callable[..., None], *args: object) -> threading.Thread:
    def run() -> None:
        try:
            target(*args)
        except Exception as error:  # noqa: BLE001 - a thread's error is the test's
            errors.append(error)

    return threading.Thread(target=run, daemon=True)
