"""Runs readers of what clients send in processes of their own, and measures what that takes at its peak."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from twinkle.core.errors import UserError

Readings: TypeAlias = Mapping[str, Callable[[], Callable[[], object]]]
"""By name: what makes a body, and then what reads it, which alone is measured."""

_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Cost:
    """What one reading took beyond what the process had before."""

    peak_bytes: int
    cpu_s: float


def measure(module: str, *, timeout_s: float) -> dict[str, Cost]:
    """The costs of all ``READINGS`` of a module of the harness, one after the other in a new process."""
    paths = os.pathsep.join(str(_ROOT / name) for name in ("src", "tests"))
    command = [sys.executable, "-m", __name__, module]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Cost(**cost) for name, cost in json.loads(done.stdout).items()}


def traced_peak_bytes(run: Callable[[], object]) -> int:
    """The most that Python's allocators held at once for ``run``, which happens in a fork and must not raise.

    In a process with other threads ``tracemalloc.stop`` may crash CPython before 3.12.9 and 3.13.2, as soon as one of
    them allocates meanwhile; a fork has no others.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send_traced_peak, args=(run, sending))
    child.start()
    sending.close()
    try:
        peak_bytes: int = receiving.recv()
    finally:
        child.join()
    return peak_bytes


def _send_traced_peak(run: Callable[[], object], sending: Connection) -> None:
    tracemalloc.start()
    run()
    _, peak_bytes = tracemalloc.get_traced_memory()
    sending.send(peak_bytes)


def _cost(make: Callable[[], Callable[[], object]]) -> dict[str, float]:
    """Measures in a fork, since freed memory stays with a process and would hide what the next reading takes."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send_cost, args=(make, sending))
    child.start()
    sending.close()
    try:
        cost: dict[str, float] = receiving.recv()
    finally:
        child.kill()
        child.join()
    return cost


def _send_cost(make: Callable[[], Callable[[], object]], sending: Connection) -> None:
    read = make()
    gc.collect()
    _RESET_PEAK.write_text("5")
    before_bytes = _peak_bytes()
    started = time.process_time()
    with suppress(UserError):
        read()
    sending.send({"peak_bytes": _peak_bytes() - before_bytes, "cpu_s": time.process_time() - started})


def _peak_bytes() -> int:
    """The largest resident size since the last reset (proc(5): VmHWM)."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    readings: Readings = import_module(sys.argv[1]).READINGS
    json.dump({name: _cost(make) for name, make in readings.items()}, sys.stdout)
