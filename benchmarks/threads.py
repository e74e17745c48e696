"""What the number of threads is worth: steps a second through the service with one, with two, with what it measures.

    python benchmarks/threads.py [--short] [--output FILE]

Each side is a service of its own; they take turns, one after the other, with nothing else started. Tenants train small
batches side by side, each with operations of several steps under way. On a machine that others use the figures mean
nothing: threads that wait for a preempted one would be all that is measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tinker

from machine import load_average, machine_facts, write_result
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.hub.tiny import make_tiny_model
from workload import adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tinker", "torch", "transformers", "numpy")
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
MEASURED = "measured"
SIDES = ("1", "2", MEASURED)
RANK = 16
NUM_DATUMS = 4
TOKENS_PER_DATUM = 64
WINDOW = 2
"""Steps of a tenant under way."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A model, the tenants on it, and how many steps each makes in one turn."""

    hidden_size: int
    layers: int
    tenants: int
    num_steps: int


FULL = (
    Load(hidden_size=128, layers=4, tenants=1, num_steps=120),
    Load(hidden_size=128, layers=4, tenants=4, num_steps=60),
    Load(hidden_size=128, layers=4, tenants=16, num_steps=20),
    Load(hidden_size=512, layers=8, tenants=1, num_steps=30),
    Load(hidden_size=512, layers=8, tenants=16, num_steps=6),
)
SHORT = (Load(hidden_size=128, layers=4, tenants=4, num_steps=8),)
TURNS = 3


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the smallest model, few steps, one turn")
    parser.add_argument("--output", type=Path, default=RESULTS / "threads.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    logging.getLogger("tinker").setLevel(logging.ERROR)
    machine, load_before = machine_facts(PACKAGES), load_average()
    cells = [measure(load, turns=1 if arguments.short else TURNS) for load in (SHORT if arguments.short else FULL)]
    result = {
        "benchmark": "threads",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {"datums": NUM_DATUMS, "tokens_per_datum": TOKENS_PER_DATUM, "rank": RANK, "window": WINDOW},
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(load: Load, *, turns: int) -> dict[str, object]:
    """All sides with one load, in turns; the median of each."""
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        texts = TEXTS.read_text(encoding="utf-8").splitlines()
        model = make_tiny_model(Path(folder) / "model", texts=texts, hidden_size=load.hidden_size, layers=load.layers)
        rates: dict[str, list[float]] = {side: [] for side in SIDES}
        measured: dict[str, object] = {}
        for turn in range(turns):
            for side in SIDES:
                home = Path(folder) / f"home-{side}-{turn}"
                # Neighbours' work and the machine's changes of pace are spread over all sides.
                rates[side].append(steps_per_s(home, model, load, threads=side))
                if side == MEASURED:
                    measured = thread_facts(home)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    best = max((side for side in SIDES if side != MEASURED), key=lambda side: medians[side])
    cell = {
        "hidden_size": load.hidden_size,
        "layers": load.layers,
        "tenants": load.tenants,
        "steps_per_s": {side: rounded(rate) for side, rate in medians.items()},
        "measured": measured,
        "best": best,
        "chose_best": measured["chosen"] == best,
        "measured_of_best": rounded(medians[MEASURED] / medians[best]),
        "load_average": load_average(),
    }
    print(cell, flush=True)
    return cell


def steps_per_s(home: Path, model: Path, load: Load, *, threads: str) -> float:
    """Runs the load on a fresh service; the steps of all tenants together, by the second."""
    # A limit that the shell has set shall not decide what is measured.
    cores = str(os.cpu_count() or 1)
    settings = {"TWINKLE_MODEL_NAME": "tiny", "TWINKLE_LOG_LEVEL": "INFO", "OMP_NUM_THREADS": cores}
    if threads != MEASURED:
        settings["TWINKLE_THREADS"] = threads
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with TwinkleService(home, model=str(model), settings=settings) as service:
        client = tinker.ServiceClient(base_url=service.url, api_key=service.create_key())
        adapters = [
            client.create_lora_training_client(base_model="tiny", rank=RANK, seed=number).result()
            for number in range(load.tenants)
        ]
        batch = make_batch(num_datums=NUM_DATUMS, tokens_per_datum=TOKENS_PER_DATUM, vocab_size=vocab_size, seed=1)
        with ThreadPoolExecutor(load.tenants) as pool:
            list(pool.map(lambda adapter: train(adapter, batch, WINDOW), adapters))
            started = time.perf_counter()
            list(pool.map(lambda adapter: train(adapter, batch, load.num_steps), adapters))
            seconds = time.perf_counter() - started
        # One that is left open beats on through the turns of the others.
        client.close("success").result()
        return load.tenants * load.num_steps / seconds


def train(adapter: tinker.TrainingClient, batch: list[tinker.Datum], num_steps: int) -> None:
    """Makes steps, some of them under way at any time."""
    adam = adam_params()
    under_way = []
    for _ in range(num_steps):
        under_way.append((adapter.forward_backward(batch, "cross_entropy"), adapter.optim_step(adam)))
        if len(under_way) > WINDOW:
            for future in under_way.pop(0):
                future.result()
    for futures in under_way:
        for future in futures:
            future.result()


def thread_facts(home: Path) -> dict[str, object]:
    """What the worker said of its measurement: the number it took, and the times it took it for.

    Raises:
        RuntimeError: It said nothing.
    """
    log = (home / "logs" / "worker-default.log").read_text()
    found = re.search(r"threads\.measured.*?\bthreads=(\d+).*", re.sub(r"\x1b\[[0-9;]*m", "", log))
    if found is None:
        raise RuntimeError(f"no number of threads in {home / 'logs' / 'worker-default.log'}")
    return {"log": found[0], "chosen": found[1]}


if __name__ == "__main__":
    main()
