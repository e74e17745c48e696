"""SIGKILL to each part of the embedded stack while tenants work; how long it takes to go on."""

from __future__ import annotations

import random
import time
from collections import Counter

import psutil
import pytest

from harness.polling import busyness
from harness.recovery import finished_again_s, now, running_again_s, tell
from harness.served import PARTS
from harness.struck import Struck

GOES_ON_WITHIN_S = 30.0
"""The goal is 5 s on two quiet cores (``docs/recovery.md`` has what was measured); a machine that does other things at
the same time needs longer. What this must tell apart is a pause and a stall."""
SOAK_S = 1800.0
SOAK_RUNS = 1000
SOAK_PAUSE_S = (2.0, 15.0)
SOAK_SEED = 20261121


@pytest.mark.parametrize("part", PARTS)
def test_a_killed_part_costs_nothing_but_a_pause(struck: Struck, part: str) -> None:
    seconds: list[float] = []

    def kill() -> None:
        finished_again_s(struck.served.query, now(), count=5)
        struck.served.part(part).kill()
        seconds.append(finished_again_s(struck.served.query, now(), count=10))

    verdict = struck.work_through(kill)

    tell(f"{part} killed, until ten more operations have ended", seconds)
    assert verdict.violations == verdict.failed == []
    assert seconds[0] < GOES_ON_WITHIN_S * busyness()


def test_the_operation_of_a_killed_worker_runs_again_soon(struck: Struck) -> None:
    seconds: list[float] = []

    def kill_three_times() -> None:
        for _ in range(3):
            struck.crashes.arm("worker.executed", count=6)
            died_at = struck.crashes.wait("worker.executed")
            seconds.append(running_again_s(struck.served.query, died_at))

    verdict = struck.work_through(kill_three_times)

    tell("the process that owns the device killed, until its operation runs again", seconds)
    assert verdict.violations == verdict.failed == []
    assert max(seconds) < GOES_ON_WITHIN_S * busyness()


def test_an_orphaned_process_takes_no_rows(struck: Struck) -> None:
    """The parent of the process that owns the device is killed alone: its child must not go on without it."""
    orphans: list[psutil.Process] = []

    def kill_parent() -> None:
        finished_again_s(struck.served.query, now(), count=5)
        orphans.append(psutil.Process(struck.served.engine_pid()))
        orphans[0].parent().kill()

    verdict = struck.work_through(kill_parent)

    assert verdict.violations == verdict.failed == []
    assert not orphans[0].is_running()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_half_an_hour_of_restarts_under_a_thousand_short_runs(struck: Struck) -> None:
    dice = random.Random(SOAK_SEED)
    killed: Counter[str] = Counter()
    (runs_before,) = struck.served.query("SELECT COUNT(*) FROM adapter")[0]
    ends_at = time.monotonic() + SOAK_S

    def restart_forever() -> None:
        while time.monotonic() < ends_at:
            time.sleep(dice.uniform(*SOAK_PAUSE_S))
            part = dice.choice(list(PARTS))
            struck.served.part(part).kill()
            killed[part] += 1

    verdict = struck.work_through(restart_forever, runs=4, steps=3)

    (runs_after,) = struck.served.query("SELECT COUNT(*) FROM adapter")[0]
    print(f"\n{runs_after - runs_before} runs; killed: {dict(killed)}")
    assert verdict.violations == verdict.failed == []
    assert runs_after - runs_before >= SOAK_RUNS and len(killed) == len(PARTS)
