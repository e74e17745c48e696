"""What a call on a group of workers with Ray costs over the same call in one process.

    python benchmarks/ray_calls.py [--short] [--workers N ...] [--output FILE]

The same component is made here, as in local mode, and on the workers of a group. Its methods do nothing, so that what
is measured is the way: an empty call, one after the other and without waiting; a batch of rows cut over the data ranks
(``slice_dp``) with a tensor that is as long; and a tensor that every rank gets whole and gives back.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import twinkle
from machine import load_average, machine_facts, write_result
from measures import latency_summary, rounded
from twinkle import DeviceGroup
from twinkle.infra import runtime

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("ray", "torch", "numpy")
MIB = 2**20


@twinkle.remote_class()
class Nothing:
    """Does nothing, in every way that a call may spread."""

    @twinkle.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def call(self) -> None:
        """An empty call."""

    @twinkle.remote_function(dispatch="all", collect="first", lazy_collect=True)
    def submit(self) -> None:
        """An empty call that nobody waits for."""

    @twinkle.remote_function(dispatch="slice_dp", collect="flatten", lazy_collect=False)
    def batch(self, inputs: list[dict[str, Any]], advantages: torch.Tensor) -> list[int]:
        """A batch, cut."""
        return [len(row["input_ids"]) for row in inputs]

    @twinkle.remote_function(dispatch="all", collect="first", lazy_collect=False)
    def echo(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor there and back."""
        return values


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two workers, few calls")
    parser.add_argument("--workers", type=int, nargs="+", help="how many, one after the other; 1, 2 and 4 if omitted")
    parser.add_argument("--output", type=Path, default=RESULTS / "ray_calls.json")
    arguments = parser.parse_args()
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    calls = 50 if arguments.short else 500
    counts = arguments.workers or ([2] if arguments.short else [1, 2, 4])
    cells = [measure("local", 1, Nothing(), calls)]
    for count in counts:
        begun = time.perf_counter()
        twinkle.initialize(mode="ray", groups=[DeviceGroup("workers", count, "cpu")])
        nothing = Nothing(remote_group="workers")
        nothing.call()
        start_s = time.perf_counter() - begun
        cells.append(measure("ray", count, nothing, calls) | {"start_s": rounded(start_s)})
        runtime.forget()
    result = {
        "benchmark": "ray_calls",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(mode: str, workers: int, nothing: Nothing, calls: int) -> dict[str, object]:
    """All ways of one component."""
    rows = [{"input_ids": list(range(512)), "labels": list(range(512))} for _ in range(8 * workers)]
    advantages = torch.zeros(len(rows))
    small, large = torch.zeros(64 * 2**10 // 4), torch.zeros(16 * MIB // 4)
    cell: dict[str, object] = {
        "mode": mode,
        "workers": workers,
        "call": latency_summary(timed(nothing.call, calls)),
        "slice_dp_8_rows_a_rank": latency_summary(timed(lambda: nothing.batch(rows, advantages), calls // 5)),
        "echo_64_kib": latency_summary(timed(lambda: nothing.echo(small), calls // 5)),
        "echo_16_mib": latency_summary(timed(lambda: nothing.echo(large), calls // 25)),
    }
    if mode == "ray":
        middle_s = statistics.median(timed(lambda: nothing.echo(large), calls // 25))
        cell |= {
            "submitted_per_s": rounded(submitted_per_s(nothing, calls)),
            "echo_mib_per_s": rounded(2 * large.nbytes / MIB / middle_s),
        }
    print(cell, flush=True)
    return cell


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call, after one that warms up."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return taken


def submitted_per_s(nothing: Nothing, calls: int) -> float:
    """Calls a second that nobody waits for, until the last of them is done."""
    nothing.call()
    start = time.perf_counter()
    for _ in range(calls):
        nothing.submit()
    nothing.call()
    return calls / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
