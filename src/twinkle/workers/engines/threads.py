"""How many threads a worker on a CPU computes with: measured once on the served model, then kept.

More threads are not always quicker: on small models they wait for each other longer than they compute. The quickest
number is measured at the first start of a mesh with its model on a kind of CPU, and published with what else the mesh
is; every later start, and whoever takes the mesh over, computes with it too. Where products are tiled
(``twinkle.model.fused.determinism``), a replay gives the bits of the first time only so.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.storage.journal.meshes import Meshes

BUDGET_S = 1.0
"""What measuring takes, unless a single pass with each number takes longer."""
HOPELESS = 1.5
"""So many times the quickest: with fewer threads still, a large model would only be slower."""
WORTH = 0.8
"""More threads must be this much quicker. They are timed alone; in service API, broker and clients want cores as well,
and a pass waits for whichever of its threads was made to wait. What the additional ones take, others do not have."""
LOOK_S = 0.5
"""How long cores are looked at before they count as free."""
MOST_USED = 0.1
LEAST_USED = 0.5
"""So much of the cores may be used by others, and half a core in any case: something always runs."""
MOST_WAIT_S = 15.0
"""At a service's first start API, housekeeping and jobs worker start beside the worker, and take about as long."""
MAX_RECORDS = 16
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

_log = structlog.get_logger()

TimePass = Callable[[int], float]


@dataclass(frozen=True)
class ThreadTimes:
    """The seconds of a pass by the number of threads, and the number to take."""

    threads: int
    seconds: Mapping[int, float]


def measure_threads(time_pass: TimePass, limit: int) -> ThreadTimes:
    """Find the number of threads, ``limit`` at most, with which a pass is quickest: the best of all times of each.

    Ranks that measure together come to the same number if ``time_pass`` gives all of them the same times.
    """
    best: dict[int, float] = {}
    numbers = candidates(limit)
    spent_s = 0.0
    while spent_s <= BUDGET_S:
        for threads in list(numbers):
            seconds = time_pass(threads)
            spent_s += seconds
            best[threads] = min(best.get(threads, math.inf), seconds)
            if spent_s > BUDGET_S and seconds > HOPELESS * min(best.values()):
                numbers = [number for number in numbers if number in best]
                break
    quickest = min(best.values())
    return ThreadTimes(min(threads for threads, seconds in best.items() if seconds * WORTH <= quickest), best)


def candidates(limit: int) -> list[int]:
    """1, 2, 4, ... and the limit itself, the most threads first: with those a large model is measured soonest."""
    powers = {1 << exponent for exponent in range(limit.bit_length())}
    return sorted({number for number in powers if number <= limit} | {limit}, reverse=True)


def wait_for_cores(number: int, *, most_s: float = MOST_WAIT_S) -> bool:
    """Wait until so many cores are free, so that what is timed on them is not what others do; false if they never were.

    Two threads wait for each other: with another process on one of two cores they can be slower than one, and quicker
    once it is done.
    """
    waited_s = 0.0
    while waited_s < most_s:
        if free_cores(LOOK_S) >= number - max(LEAST_USED, MOST_USED * number):
            return True
        waited_s += LOOK_S
    return False


def free_cores(seconds: float) -> float:
    """How many of the cores that this process may run on nobody used, meanwhile, while it slept."""
    before = _idle_s()
    started = time.monotonic()
    time.sleep(seconds)
    return (_idle_s() - before) / (time.monotonic() - started)


def _idle_s() -> float:
    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    # A core that waits for a disk computes nothing; only Linux tells.
    return float(sum(times.idle + getattr(times, "iowait", 0.0) for core, times in enumerate(cores) if core in usable))


def thread_limit(ranks: int, *, cores: int | None = None) -> int:
    """How many threads a rank may have: all cores if there is one, else its share of what is left beside the API."""
    cores = usable_cores() if cores is None else cores
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:
        cores = min(cores, int(asked) * ranks + (ranks > 1))
    return cores if ranks == 1 else max(1, (cores - 1) // ranks)


def usable_cores(cgroup: Path = CGROUP, own: Path = OWN_CGROUP) -> int:
    """The cores this process may run on, by its affinity and by the quota of its control group."""
    # Not everywhere is there such a thing as affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _quota(cgroup, own)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def kind_of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


class ThreadRecord:
    """The numbers of threads that a mesh has kept, by model, kind of CPU and number of ranks."""

    def __init__(self, meshes: Meshes, settings: Settings, *, cpu: str | None = None) -> None:
        self._settings = settings
        self._key = f"{settings.resolved_model_name}, {cpu or kind_of_cpu()}, ranks {settings.ranks}"
        self._meshes = meshes
        self._chosen = 0
        self._numbers = self._read()

    def settings(self, *, limit: int) -> Settings:
        """The settings to build the engine with, the number that is kept among them if none is given.

        One above ``limit`` cannot be kept to: it is measured anew.
        """
        kept = self._numbers.get(self._key)
        if self._settings.threads or self._settings.measure_threads or self._settings.device != "cpu" or kept is None:
            return self._settings
        if kept > limit:
            _log.warning("threads.too_few_cores", kept=kept, limit=limit, next="the number is measured anew")
            return self._settings
        _log.info("threads.kept", threads=kept, key=self._key)
        return self._settings.model_copy(update={"threads": kept})

    @property
    def is_outdated(self) -> bool:
        """Whether another number is kept by now: of a worker that was quicker, while this one loaded its model."""
        if self._settings.threads or self._settings.measure_threads:
            return False
        return self._read().get(self._key) not in (self._numbers.get(self._key), self._chosen)

    def written_into(self, capabilities: MeshCapabilities) -> MeshCapabilities:
        """What to publish: the number in force is kept from now on, unless the operator gave it for this start."""
        numbers, self._chosen = self._numbers, capabilities.threads
        if not self._settings.threads and capabilities.device == "cpu" and capabilities.threads:
            others = {key: number for key, number in numbers.items() if key != self._key}
            numbers = dict([*others.items(), (self._key, capabilities.threads)][-MAX_RECORDS:])
        return capabilities.model_copy(update={"threads_measured": numbers})

    def _read(self) -> dict[str, int]:
        mesh = next((mesh for mesh in self._meshes.all() if mesh.name == self._settings.mesh), None)
        return {} if mesh is None or mesh.capabilities is None else dict(mesh.capabilities.threads_measured)


def _quota(cgroup: Path, own: Path) -> float | None:
    """The cores' worth of time this process may use: the least of its control group's and of those around it."""
    quotas = []
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroup / "cpu" if controllers else cgroup
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            quotas += _quota_of(folder)
            if folder == root:
                break
    return min(quotas, default=None)


def _quota_of(folder: Path) -> list[float]:
    """What is written in one folder, by version 2 of control groups or by version 1; nothing if there is no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
