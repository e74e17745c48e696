"""What many tenants in one pass are worth: tokens per second of forward and backward, against what else one could do.

    python benchmarks/fusion.py [--short] [--processes] [--determinism] [--family FAMILY] [--threads N] [--output FILE]

Tenants with ranks of their own bring one sequence each. Our engine fuses them; the others are plain PEFT that switches
adapters, our engine tenant by tenant, and two limits: one tenant with the whole batch in our engine, and in plain PEFT.
All are alive all the time and take turns, so that a busy machine is busy for all; what counts is the ratio.

``--family qwen3_5_text`` takes a hybrid of the same size (every other layer a gated delta net; with ``nemotron_h``
Mamba-2) in place of a dense model; written to ``fusion-qwen3_5_text.json``, its cells lie beside the dense model's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from fusion_sides import (
    ENGINE_WAYS,
    PEFT_WAYS,
    RANKS,
    TOKENS_PER_PASS,
    Ask,
    EngineSide,
    Load,
    MemorySide,
    MklMode,
    Pass,
    PeftSide,
    SideProcess,
    Way,
)
from machine import load_average, machine_facts
from measures import rounded
from twinkle.hub.tiny import Family, make_tiny_model

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "numpy")
# What ``twinkle worker`` sets for its child. Every side is a fresh process and reads them when it starts.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "4294967295"}

DENSE: Family = "qwen3"
WAYS: tuple[Way, ...] = (*ENGINE_WAYS, *PEFT_WAYS)
MODES: tuple[MklMode, ...] = ("strict", "tiled", "none")
TENANTS = (1, 2, 4, 8, 16, 32)
TOKENS = (32, 128, 512)
DETERMINISM_LOADS = (Load(tenants=16, tokens=32), Load(tenants=16, tokens=128))
PROCESS_COUNTS = (1, 2, 4)
PROCESS_TOKENS = 128
PROCESS_PASSES = 8
LOSS_TOLERANCE = 1e-3
"""Relative. All compute in float32 from the same weights (B is zero at the start), in other orders of summation."""

GOALS = {
    "peft_32": ("× switching in PEFT at 32 tokens", 2.5),
    "peft_128_on": ("× switching in PEFT from 128 tokens on", 1.25),
    "peft_any": ("× switching in PEFT, any mix", 1.0),
    "limit": ("of one tenant with the whole batch", 0.9),
    "single": ("× PEFT for a single tenant", 1 / 1.05),
    "exactness": ("of the speed without exactness", 0.9),
}


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, few cells, few rounds")
    parser.add_argument("--processes", action="store_true", help="also separate processes, each with its own base")
    parser.add_argument("--determinism", action="store_true", help="also what exactness costs")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on every side")
    parser.add_argument("--family", choices=get_args(Family), default=DENSE, help="of the base model")
    parser.add_argument("--output", type=Path, help="results/fusion.json, with the family's name if another was asked")
    arguments = parser.parse_args()
    family = arguments.family
    output = arguments.output or RESULTS / ("fusion.json" if family == DENSE else f"fusion-{family}.json")
    os.environ.update({**ALLOCATOR, **os.environ})
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home:
        model = make_model(Path(home) / "model", family=family, short=arguments.short)
        cells = measure_cells(model, cell_loads(short=arguments.short), arguments.threads, short=arguments.short)
        determinism = measure_determinism(model, short=arguments.short) if arguments.determinism else []
        processes = measure_processes(model, short=arguments.short) if arguments.processes else []
        memory = measure_memory(model)
        config = json.loads((model / "config.json").read_text())
    result = {
        "benchmark": "fusion",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "workload": {
            "family": family,
            "hidden_size": config["hidden_size"],
            "layers": config.get("num_hidden_layers") or len(config["layers_block_type"]),
            "vocab_size": config["vocab_size"],
            "ranks": RANKS,
            "threads": arguments.threads,
            "tokens_per_pass": TOKENS_PER_PASS,
        },
        "cells": cells,
        "memory": memory,
        "determinism": determinism,
        "processes": processes,
        "goals": goals_of(cells, determinism),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {output}")


def make_model(folder: Path, *, family: Family = DENSE, short: bool) -> Path:
    """Makes the base; made-up words give the tokenizer, and so the head, its size."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9))) for _ in range(6000)]
    texts = [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)]
    if short:
        return make_tiny_model(folder, texts=texts, family=family, vocab_size=2048, hidden_size=128, layers=2)
    return make_tiny_model(folder, texts=texts, family=family, vocab_size=8192, hidden_size=256, layers=4)


def cell_loads(*, short: bool) -> list[Load]:
    """Returns the loads, few tenants first: PEFT's switch becomes slower with every adapter it holds."""
    tenants, tokens = ((1, 4, 16), (32, 128)) if short else (TENANTS, TOKENS)
    return [Load(tenants=count, tokens=length) for count in tenants for length in tokens]


def rounds_of(load: Load, *, short: bool) -> int:
    """Returns how often each way runs: small passes often, since they scatter most and cost least."""
    if short:
        return 3
    total = load.tenants * load.tokens
    return next((rounds for limit, rounds in ((512, 11), (2048, 5)) if total <= limit), 3)


def measure_cells(model: Path, loads: Sequence[Load], threads: int, *, short: bool) -> list[dict[str, object]]:
    """Runs every load every way, in turns; the order turns around from round to round."""
    cells: list[dict[str, object]] = []
    with SideProcess(EngineSide, model, threads, "strict") as engine, SideProcess(PeftSide, model, threads) as peft:
        asked = [(engine, way) for way in ENGINE_WAYS] + [(peft, way) for way in PEFT_WAYS]
        for side, way in asked:
            side.ask(Ask(load=loads[0], way=way, times=3))
        for load in loads:
            passes: dict[Way, list[Pass]] = {way: [] for way in WAYS}
            for _ in range(rounds_of(load, short=short)):
                for side, way in asked:
                    passes[way].append(side.ask(Ask(load=load, way=way)))
                asked.reverse()
            check_same_loss({way: done[0].loss for way, done in passes.items()})
            cells.append({**cell_summary(load, passes), "load_average": load_average()})
            print(cells[-1], flush=True)
    return cells


def measure_determinism(model: Path, *, short: bool) -> list[dict[str, object]]:
    """Runs the fused way in each mode, in turns; a process reads its mode once."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        sides = {mode: stack.enter_context(SideProcess(EngineSide, model, 1, mode)) for mode in MODES}
        for load in DETERMINISM_LOADS[: 1 if short else None]:
            order = Ask(load=load, way="fused")
            for side in sides.values():
                side.ask(order)
            passes: dict[MklMode, list[Pass]] = {mode: [] for mode in MODES}
            for _ in range(3 if short else 9):
                for mode, side in sides.items():
                    passes[mode].append(side.ask(order))
            rows += [
                {
                    "tenants": load.tenants,
                    "tokens": load.tokens,
                    "mode": mode,
                    "measured_mode": sides[mode].facts.determinism,
                    "tokens_per_cpu_s": tokens_per_s(load, [one.cpu_s for one in passes[mode]]),
                    "of_none": speed_ratio(passes[mode], passes["none"]),
                }
                for mode in MODES
            ]
    return rows


def measure_processes(model: Path, *, short: bool) -> list[dict[str, object]]:
    """Runs N tenants in N processes with a base each, then fused in one that may use as many cores."""
    rows: list[dict[str, object]] = []
    cores = os.cpu_count() or 1
    for count in PROCESS_COUNTS[: 1 if short else None]:
        load, alone = Load(tenants=count, tokens=PROCESS_TOKENS), Load(tenants=1, tokens=PROCESS_TOKENS)
        with ExitStack() as stack:
            threads = max(1, cores // count)
            apart = [stack.enter_context(SideProcess(PeftSide, model, threads)) for _ in range(count)]
            fused = stack.enter_context(SideProcess(EngineSide, model, cores, "strict"))
            apart_s, fused_s = [], []
            separate, together = (
                Ask(load=alone, way="peft_switching", times=PROCESS_PASSES),
                Ask(load=load, way="fused", times=PROCESS_PASSES),
            )
            run_beside(apart, separate)
            run_beside([fused], together)
            for _ in range(3 if short else 5):
                seconds, apart_passes = run_beside(apart, separate)
                apart_s.append(seconds)
                seconds, fused_passes = run_beside([fused], together)
                fused_s.append(seconds)
            rows.append(
                {
                    "processes": count,
                    "tokens": PROCESS_TOKENS,
                    "threads_each": threads,
                    "fused_threads": cores,
                    "separate_tokens_per_s": tokens_per_s(load, apart_s, times=PROCESS_PASSES),
                    "fused_tokens_per_s": tokens_per_s(load, fused_s, times=PROCESS_PASSES),
                    "separate_rss_mib": rounded(sum(one.rss_bytes for one in apart_passes) / 2**20),
                    "fused_rss_mib": rounded(sum(one.rss_bytes for one in fused_passes) / 2**20),
                }
            )
    return rows


def run_beside(sides: Sequence[SideProcess], order: Ask) -> tuple[float, list[Pass]]:
    """Returns the wall time until the last of several sides has done the same order, and what each says of it."""
    started = time.perf_counter()
    for side in sides:
        side.send(order)
    passes: list[Pass] = [side.answer() for side in sides]
    return time.perf_counter() - started, passes


def measure_memory(model: Path) -> dict[str, object]:
    """Returns what one more training tenant takes, in a process that does nothing else."""
    with SideProcess(MemorySide, model) as side:
        memory = side.facts.memory
    assert memory is not None
    return {
        "rank": memory.rank,
        "adapter_mib": rounded(memory.size_bytes / 2**20),
        "base_mib": rounded(memory.base_bytes / 2**20),
        "rss_growth_mib": rounded(memory.rss_growth_bytes / 2**20),
    }


def check_same_loss(
    losses: Mapping[Way, float], *, reference: Way = "peft_switching", tolerance: float = LOSS_TOLERANCE
) -> None:
    """Raises RuntimeError unless all ways give one loss: else they would not be doing the same work."""
    expected = losses[reference]
    for way, got in losses.items():
        if abs(got - expected) > tolerance * abs(expected):
            raise RuntimeError(f"the loss is {got} {way} and {expected} {reference}")


def cell_summary(load: Load, passes: Mapping[Way, Sequence[Pass]]) -> dict[str, object]:
    """Returns each way's tokens per second, and the fused way's speed as a multiple of every other's."""
    others = [way for way in WAYS if way != "fused"]
    return {
        "tenants": load.tenants,
        "tokens": load.tokens,
        "rounds": len(passes["fused"]),
        "tokens_per_cpu_s": {way: tokens_per_s(load, [one.cpu_s for one in passes[way]]) for way in WAYS},
        "tokens_per_s": {way: tokens_per_s(load, [one.wall_s for one in passes[way]]) for way in WAYS},
        "fused_against": {way: speed_ratio(passes["fused"], passes[way]) for way in others},
        "fused_against_wall": {way: speed_ratio(passes["fused"], passes[way], wall=True) for way in others},
    }


def tokens_per_s(load: Load, seconds: Sequence[float], *, times: int = 1) -> float:
    """Returns the tokens of all tenants over the median time."""
    return rounded(load.tenants * load.tokens * times / statistics.median(seconds))


def speed_ratio(ours: Sequence[Pass], theirs: Sequence[Pass], *, wall: bool = False) -> float:
    """Returns how many times as fast the first is: the median over rounds of neighbours, by CPU time unless told."""
    return rounded(
        statistics.median(
            other.wall_s / one.wall_s if wall else other.cpu_s / one.cpu_s
            for one, other in zip(ours, theirs, strict=True)
        )
    )


def goals_of(cells: Sequence[Mapping[str, object]], determinism: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Returns for each goal the worst and the best cell it speaks of, and which tenants miss it."""
    several = [cell for cell in cells if cell["tenants"] != 1]
    seen: dict[str, list[tuple[str, float]]] = {
        "peft_32": _ratios([cell for cell in several if cell["tokens"] == 32], "peft_switching"),
        "peft_128_on": _ratios([cell for cell in several if cell["tokens"] != 32], "peft_switching"),
        "peft_any": _ratios(several, "peft_switching"),
        "limit": _ratios(several, "limit"),
        "single": _ratios([cell for cell in cells if cell["tenants"] == 1], "peft_switching"),
        "exactness": [
            (f"{row['tenants']} x {row['tokens']}", float(str(row["of_none"])))
            for row in determinism
            if row["mode"] == "strict"
        ],
    }
    return {
        name: {
            "what": GOALS[name][0],
            "goal": rounded(GOALS[name][1]),
            "worst": min(value for _, value in values),
            "best": max(value for _, value in values),
            "missed_at": [where for where, value in values if value < GOALS[name][1]],
        }
        for name, values in seen.items()
        if values
    }


def _ratios(cells: Sequence[Mapping[str, object]], way: Way) -> list[tuple[str, float]]:
    pairs = []
    for cell in cells:
        against = cell["fused_against"]
        assert isinstance(against, Mapping)
        pairs.append((f"{cell['tenants']} x {cell['tokens']}", float(against[way])))
    return pairs


if __name__ == "__main__":
    main()
