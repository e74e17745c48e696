"""No room on the disk, for the journal, the objects and the logs alike: the kernel refuses every byte of growth."""

from __future__ import annotations

import resource
import threading

import psutil

from harness.recovery import finished_again_s, now, tell
from harness.served import PARTS
from harness.struck import Struck

FULL_S = 3.0
WRITERS = (PARTS["the API"], PARTS["the broker"], "spawn_main")


def _limit(processes: list[psutil.Process], size_bytes: int) -> None:
    for process in processes:
        process.rlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def test_a_full_disk_pauses_everything_and_loses_nothing(struck: Struck) -> None:
    seconds: list[float] = []
    refused: list[int] = []

    def fill() -> None:
        finished_again_s(struck.served.query, now(), count=5)
        # A limit of one page: the write-ahead log, the blobs and the logs have all grown past it.
        processes = [process for pattern in WRITERS for process in struck.served.processes(pattern)]
        _limit(processes, 4096)
        since = now()
        try:
            threading.Event().wait(FULL_S)
            refused.append(struck.served.query("SELECT COUNT(*) FROM operation WHERE finished_at > ?", since + 1)[0][0])
        finally:
            _limit(processes, resource.RLIM_INFINITY)
        seconds.append(finished_again_s(struck.served.query, now(), count=10))

    verdict = struck.work_through(fill)

    tell("the disk full for three seconds, from its end until ten more operations have ended", seconds)
    assert refused == [0]  # it was full indeed
    assert verdict.violations == verdict.failed == []
