"""What a second rank is worth: a training step on one rank, on two that hold the base each, and on two that share it.

    python benchmarks/ranks.py [--short] [--output FILE]

The engine alone, without the service: forward and backward of one tenant's batch, then the optimizer's step. All sides
are alive all the time and take turns, so that a busy machine is busy for all; what counts is the ratio. Each rank has
one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from fusion import make_model
from fusion_sides import Ask, Load, SideFacts, SideProcess, Way, make_tokens
from machine import load_average, machine_facts, write_result
from measures import rounded

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "numpy")
LORA_RANK = 16
LOSS_TOLERANCE = 1e-3
"""Relative, after some steps: two ranks add gradients up in another order than one."""
LOADS = (Load(tenants=1, tokens=128), Load(tenants=1, tokens=32))
NUM_DATUMS = 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks, and what each holds of the base model."""

    ranks: int
    shard: str


LAYOUTS: Mapping[str, Layout] = {
    "one rank": Layout(ranks=1, shard="replicate"),
    "two ranks, replicated": Layout(ranks=2, shard="replicate"),
    "two ranks, sharded": Layout(ranks=2, shard="fsdp"),
}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One step of one side."""

    wall_s: float
    cpu_s: float
    loss: float


class RanksSide:
    """A mesh of so many ranks, and one adapter on it."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        from twinkle.core.adapter import AdapterConfig  # noqa: PLC0415 - the parent only orders and needs none of it
        from twinkle.core.settings import Settings  # noqa: PLC0415
        from twinkle.workers.process import build_engine  # noqa: PLC0415

        settings = Settings(model=str(folder), model_name="tiny", ranks=layout.ranks, shard=layout.shard, threads=1)
        self._engine = build_engine(settings)
        self._adapter = self._engine.create(AdapterConfig(base_model="tiny", rank=LORA_RANK, seed=0))
        self.facts = SideFacts(determinism=self._engine.capabilities.determinism)

    def prepare(self, load: Load) -> None:
        """Make the batch; off the clock."""
        from twinkle.wire.training import ForwardBackwardBody, WireDatum  # noqa: PLC0415
        from twinkle.workers.engine import Pass  # noqa: PLC0415

        weights = np.ones(load.tokens, dtype=np.float32)
        rows = [make_tokens(number, load.tokens, self._engine.capabilities.vocab_size) for number in range(NUM_DATUMS)]
        data = tuple(WireDatum(row[:-1], {"target_tokens": row[1:], "weights": weights}) for row in rows)
        body = ForwardBackwardBody("adapter", 0, False, "cross_entropy", {}, data)
        self._pass = Pass(state=self._adapter, body=body)

    def run(self, load: Load, way: Way) -> float:
        """One step; the loss before it."""
        from twinkle.wire.bodies.training import AdamParams  # noqa: PLC0415

        [answer] = self._engine.run_passes([self._pass])
        if isinstance(answer, Exception):
            raise answer
        self._engine.optim_step(self._adapter, AdamParams(learning_rate=1e-4))
        return float(answer.metrics["loss:sum"])

    def forget(self) -> None:
        """Nothing is left of a step."""


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, one load, few rounds")
    parser.add_argument("--output", type=Path, default=RESULTS / "ranks.json")
    arguments = parser.parse_args()
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home:
        model = make_model(Path(home) / "model", short=arguments.short)
        config = json.loads((model / "config.json").read_text())
        loads, rounds = (LOADS[:1], 3) if arguments.short else (LOADS, 15)
        cells = measure(model, loads, rounds=rounds)
    result = {
        "benchmark": "ranks",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "workload": {
            "hidden_size": config["hidden_size"],
            "layers": config["num_hidden_layers"],
            "vocab_size": config["vocab_size"],
            "lora_rank": LORA_RANK,
            "datums": NUM_DATUMS,
        },
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(model: Path, loads: tuple[Load, ...], *, rounds: int) -> list[dict[str, object]]:
    """Lets all layouts step in turns, load after load."""
    cells: list[dict[str, object]] = []
    with ExitStack() as stack:
        sides = {name: stack.enter_context(SideProcess(RanksSide, model, layout)) for name, layout in LAYOUTS.items()}
        for load in loads:
            for side in sides.values():
                step(side, load)
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            for number in range(rounds):
                names = list(sides) if number % 2 == 0 else list(reversed(sides))
                for name in names:
                    turns[name].append(step(sides[name], load))
            check_same_loss({name: done[-1].loss for name, done in turns.items()})
            cells += [{"tokens": load.tokens, **summary(name, turns), "load_average": load_average()} for name in sides]
            print(*cells[-len(sides) :], sep="\n", flush=True)
    return cells


def step(side: SideProcess, load: Load) -> Turn:
    """One step of one side, with the CPU time of all processes of all sides: the others wait."""
    before = cpu_s()
    done = side.ask(Ask(load=load, way="fused"))
    return Turn(wall_s=done.wall_s, cpu_s=cpu_s() - before, loss=done.loss)


def cpu_s() -> float:
    """CPU seconds of all processes below this one."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(one.user + one.system for one in times)


def check_same_loss(losses: Mapping[str, float]) -> None:
    """Raises RuntimeError unless all sides have come to the same loss: else they would not be doing the same work."""
    expected = losses["one rank"]
    for name, loss in losses.items():
        if abs(loss - expected) > LOSS_TOLERANCE * abs(expected):
            raise RuntimeError(f"the loss is {loss} on {name} and {expected} on one rank")


def summary(name: str, turns: Mapping[str, list[Turn]]) -> dict[str, object]:
    """Returns a side's medians, and the ratio of one rank's step to the side's beside it: median and quartiles."""
    ratios = [one.wall_s / ours.wall_s for one, ours in zip(turns["one rank"], turns[name], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cpu = [statistics.fmean(turn.cpu_s for turn in turns[side]) for side in (name, "one rank")]
    return {
        "layout": name,
        "steps": len(ratios),
        "step_ms": rounded(1000 * statistics.median(turn.wall_s for turn in turns[name])),
        "speed_up": rounded(middle),
        "speed_up_quartiles": [rounded(low), rounded(high)],
        "cpu_ms": rounded(1000 * cpu[0]),
        "cpu_ratio": rounded(cpu[0] / cpu[1]),
    }


if __name__ == "__main__":
    main()
