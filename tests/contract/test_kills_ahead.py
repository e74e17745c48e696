"""A worker dies with much in hand: what it had begun is done once, and what it had not is blamed for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from harness.journal import Bench
from harness.lookahead import STEPS, assert_as_one_by_one, column, die, once_in_a_pass
from harness.operations import submit_run
from harness.worker import CLAIM_S, Killed, MakeWorker

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
    "snapshot.copied": "adapters.residents",
}
"""The points of a worker that looks ahead, and the file of each."""
SOAK_ROUNDS = 60
SOAK_SEED = 20261123


def test_a_kill_with_as_many_in_hand_as_may_be_blames_none_that_was_not_begun(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = submit_run(bench, *STEPS, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    running: list[object] = []

    def die() -> None:
        running.extend(column(bench.stores, "state", range(len(run))))
        raise Killed

    once_in_a_pass(worker, die, nth=2)
    with suppress(Killed):
        worker.drain()
    first = running.index("running")
    successor = make_worker(snapshot_every_ops=100)

    successor.drain()

    assert running[first:].count("running") == 8
    assert sum(column(bench.stores, "suspicions", range(first + 1, len(run)))) == 0  # type: ignore[arg-type]
    assert column(bench.stores, "attempts", range(first + 1, len(run))) == [1] * (len(run) - first - 1)
    assert_as_one_by_one(successor, bench, run)


@pytest.mark.parametrize("when", ["in a pass", "after_claim", "before_commit", "after_commit"])
def test_a_kill_with_operations_in_hand_leaves_them_blameless(bench: Bench, make_worker: MakeWorker, when: str) -> None:
    run = submit_run(bench, *STEPS)
    worker = make_worker(snapshot_every_ops=100)
    worker.drain(1)
    if when == "in a pass":
        once_in_a_pass(worker, die)
    else:
        setattr(worker.journal, when, die)
    with suppress(Killed):
        worker.drain()

    successor = make_worker(snapshot_every_ops=100)
    successor.drain()

    assert_as_one_by_one(successor, bench, run)
    suspicions = column(bench.stores, "suspicions", range(len(run)))
    assert (sum(suspicions) <= 1 and suspicions[2:] == [0] * 5) or suspicions[3:] == [0] * 4  # type: ignore[arg-type]


def test_behind_an_operation_that_lost_its_worker_nothing_is_claimed_ahead(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """Should it be to blame, it dies alone: what stands behind it is not in the worker's hands again."""
    submit_run(bench, *STEPS)
    victim = make_worker(snapshot_every_ops=100)
    victim.drain(1)
    once_in_a_pass(victim, die)
    with suppress(Killed):
        victim.drain()
    successor = make_worker(snapshot_every_ops=100)
    seen: list[object] = []
    once_in_a_pass(successor, lambda: seen.extend(column(bench.stores, "state", range(1, 4))))

    successor.drain()

    assert seen == ["running", "queued", "queued"]
    assert column(bench.stores, "suspicions", range(1, 7)) == [1, 0, 0, 0, 0, 0]


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
        assert_as_one_by_one(successor, bench, run, name)
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
