"""SIGKILL at every narrow moment of an operation's life: nothing is lost, doubled, reordered or stuck."""

from __future__ import annotations

import random

import pytest

from harness.history import History
from harness.polling import wait_until
from harness.struck import Struck

REPLAYING = "worker.replaying"
# Parts by turns: the one that dies again and again is started again after ever longer pauses.
APART = [
    ("api.payload_stored", "worker.committed"),
    ("api.committed", "worker.published"),
    ("api.lane_opened", "housekeeping.nudging"),
    ("api.nudged", "checkpoint.file_stored"),
    ("journal.append", "snapshot.stored"),
    ("blob.written", "housekeeping.gaps_closed"),
]
"""Two at a time, which come by whether or not the other has."""
# With a count where the first time would be too early to have anything to restore.
IN_TURN = [
    ("worker.claimed", "worker.claimed_ahead"),
    ("worker.overtaking:2", "worker.handed_over"),
    ("journal.commit:4", "lease.acquired"),
    ("sampler.claimed", "sampler.executed"),
    ("sampler.committed", "sampler.published"),
    ("snapshot.listed:2", "worker.committed:9"),
    ("snapshot.copied", "worker.executed:2"),
]
"""The kill at the one leads to the other."""
RARE = [("worker.taken_ahead:2", "worker.noting:3"), ("worker.telling:2", "worker.taken_ahead")]


@pytest.mark.parametrize(
    "points", [*APART, *IN_TURN, *(pytest.param(points, marks=pytest.mark.soak) for points in RARE)], ids="+".join
)
def test_a_kill_at(struck: Struck, points: tuple[str, ...]) -> None:
    verdict = struck.work_through(lambda: _kill_at(struck, points))

    assert verdict.violations == []
    assert verdict.failed == []


def test_a_kill_while_what_a_kill_undid_is_done_again(struck: Struck) -> None:
    """With one run the ninth batch is an ``optim_step``, whose gradients no recovery point holds.

    With two, a batch may find each run just where a recovery point has left it, and then there is nothing to replay.
    """
    verdict = struck.work_through(lambda: _kill_at(struck, ("worker.executed:9", REPLAYING)), runs=1)

    assert verdict.violations == []
    assert verdict.failed == []


def test_after_a_kill_right_behind_a_recovery_point_nothing_is_done_again(struck: Struck) -> None:
    history = History()
    tenant = struck.tenant(history)
    run = tenant.new_run(tenant.new_session(), 0)
    run.train(3)
    last_seq = run.next_seq - 1
    covered = "SELECT seq FROM snapshot WHERE adapter = ? AND seq = ?"
    wait_until(lambda: struck.served.query(covered, run.id, last_seq), what=f"a recovery point at {last_seq}")

    struck.crashes.arm(REPLAYING)
    struck.crashes.arm("worker.executed")
    run.train(1)

    assert struck.crashes.has_fired("worker.executed")
    assert not struck.crashes.has_fired(REPLAYING)
    struck.crashes.disarm(REPLAYING)
    verdict = struck.verdict(tenant, history)
    assert verdict.violations == []
    assert verdict.failed == []


SOAK_KILLS = 200
SOAK_SEED = 20261121
PLACES_A_BURST = 4


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills_at_points_drawn_at_random(struck: Struck) -> None:
    dice = random.Random(SOAK_SEED)
    fired: list[str] = []

    def kill() -> None:
        # Whether a kill leaves anything to do again is as it happens.
        struck.crashes.arm(REPLAYING, count=dice.randint(1, 6))
        for points in dice.choices([*APART, *IN_TURN, *RARE], k=PLACES_A_BURST):
            # Where one point leads to the next the counts are what they must be.
            drawn = tuple(f"{point}:{dice.randint(1, 6)}" for point in points) if points in APART else points
            fired.extend(_kill_at(struck, drawn))
        if struck.crashes.has_fired(REPLAYING):
            fired.append(REPLAYING)

    while len(fired) < SOAK_KILLS:
        verdict = struck.work_through(kill, runs=3)
        assert verdict.violations == verdict.failed == []
    print(f"\n{len(fired)} kills at {len(set(fired))} points")
    assert len(set(fired)) > len(APART) + len(IN_TURN) // 2


def _kill_at(struck: Struck, points: tuple[str, ...], *, deadline_s: float = 120) -> list[str]:
    """Arm all points, then wait until somebody has died at each; their names."""
    names = [_name(point) for point in points]
    for name, point in zip(names, points, strict=True):
        struck.crashes.arm(name, count=int(point.partition(":")[2] or 1))
    for name in names:
        struck.crashes.wait(name, deadline_s=deadline_s)
    return names


def _name(point: str) -> str:
    return point.partition(":")[0]
