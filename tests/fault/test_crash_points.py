"""SIGKILL at every narrow moment of an operation's life: nothing is lost, doubled, reordered or stuck."""

from __future__ import annotations

import random

import pytest

from harness.struck import Struck

pytestmark = pytest.mark.timeout(240)

# With a count where the first time would be too early to have anything to restore.
POINTS = [
    ("api.payload_stored",),
    ("api.committed",),
    ("api.lane_opened",),
    ("api.nudged",),
    ("journal.append",),
    ("blob.written",),
    ("worker.claimed",),
    ("worker.executed:9", "worker.replaying"),
    ("journal.commit:4", "lease.acquired"),
    ("worker.committed",),
    ("worker.published",),
    ("sampler.claimed", "sampler.executed"),
    ("sampler.committed",),
    ("checkpoint.file_stored",),
    ("snapshot.stored",),
    ("snapshot.listed:2", "worker.committed:9"),
    ("housekeeping.nudging",),
    ("housekeeping.gaps_closed",),
]


@pytest.mark.parametrize("points", POINTS, ids="+".join)
def test_a_kill_at(struck: Struck, points: tuple[str, ...]) -> None:
    def kill() -> None:
        names = [point.partition(":")[0] for point in points]
        for name, point in zip(names, points, strict=True):
            struck.crashes.arm(name, count=int(point.partition(":")[2] or 1))
        for name in names:
            struck.crashes.wait(name)

    verdict = struck.work_through(kill)

    assert verdict.violations == []
    assert verdict.failed == []


SOAK_KILLS = 200
SOAK_SEED = 20261121
KILLS_A_BURST = 4


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills_at_points_drawn_at_random(struck: Struck) -> None:
    dice = random.Random(SOAK_SEED)
    names = sorted({point.partition(":")[0] for points in POINTS for point in points} - {"worker.replaying"})
    fired: list[str] = []

    def kill() -> None:
        for name in dice.choices(names, k=KILLS_A_BURST):
            struck.crashes.arm(name, count=dice.randint(1, 6))
            struck.crashes.wait(name, deadline_s=120)
            fired.append(name)

    while len(fired) < SOAK_KILLS:
        verdict = struck.work_through(kill, runs=3)
        assert verdict.violations == verdict.failed == []
    print(f"\n{len(fired)} kills at {len(set(fired))} points")
    assert len(set(fired)) > len(names) // 2
