"""What our own client costs beside the official SDK: from call to ``result()`` on one service that computes nothing.

    python benchmarks/native_client.py [--short] [--output FILE]

Both load the same `twinkle serve --engine null` in turns, from client processes of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

from machine import load_average, machine_facts, write_result
from queue_overhead import MAX_CLIENT_PROCESSES, RESULTS, SERIAL, WARM_UP_S, Contender, Plan, measure_cells
from sdk_load import LoadPool
from sides import native_side, sdk_side
from stack import TwinkleService, end_in_order_on_sigterm
from workload import BASE_MODEL, NUM_DATUMS, RANK, TOKENS_PER_DATUM

PACKAGES = ("tinker", "pyqwest", "httpx", "protobuf", "pydantic")
SIDES = {"sdk": sdk_side, "native": native_side}
FULL = Plan(adapters=(1, 16), steps_in_flight=(SERIAL, 1, 4), rounds=3, window_s=4.0, floor_calls=0)
SHORT = Plan(adapters=(1, 16), steps_in_flight=(SERIAL, 1), rounds=1, window_s=2.0, floor_calls=0)


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one round of fewer, shorter windows")
    parser.add_argument("--output", type=Path, default=RESULTS / "native_client.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    result = measure(SHORT if arguments.short else FULL)
    write_result(arguments.output, result)


def measure(plan: Plan) -> dict[str, object]:
    """Runs the whole plan; returns the result file's content."""
    machine, load_before = machine_facts(PACKAGES), load_average()
    most = max(plan.adapters)
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        service = stack.enter_context(
            TwinkleService(
                home / "twinkle",
                model=BASE_MODEL,
                engine="null",
                settings={"TWINKLE_MAX_RESIDENT_ADAPTERS": str(2 * len(SIDES) * most)},
            )
        )
        key = service.create_key()
        contenders = []
        for name, side in SIDES.items():
            load = LoadPool(
                url=service.url, api_key=key, num_processes=MAX_CLIENT_PROCESSES, num_adapters=most, side=side
            )
            contenders.append(Contender(name=name, server=service, load=stack.enter_context(load)))
        for contender in contenders:
            contender.load.run(num_adapters=most, steps_in_flight=1, duration_s=WARM_UP_S)
        cells = measure_cells(plan, contenders)
    return {
        "benchmark": "native_client",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "datums": NUM_DATUMS,
            "tokens_per_datum": TOKENS_PER_DATUM,
            "rank": RANK,
            "rounds": plan.rounds,
            "window_s": plan.window_s,
        },
        "cells": cells,
    }


if __name__ == "__main__":
    main()
