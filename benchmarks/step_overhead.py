"""What a training step through the service costs, against the same step in plain PEFT in one process.

    python benchmarks/step_overhead.py [--short] [--threads N ...] [--output FILE]

Same tiny Qwen3 models with random weights, same tokens, rank, loss and optimizer, same number of threads. Both are
alive all the time and take turns in short rounds, so that a busy machine is busy for both; what counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tinker

from machine import load_average, machine_facts
from measures import median_of, rounded
from peft_loop import PeftLoop, PlainBatch, Step
from stack import TwinkleService
from twinkle.hub.tiny import make_tiny_model
from workload import adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tinker", "torch", "transformers", "peft", "numpy")
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
NUM_DATUMS = 8
TOKENS_PER_DATUM = 128
RANK = 16
WARM_UP_STEPS = 3
LOSS_TOLERANCE = 1e-3
"""Relative. Both compute in float32 from the same weights (B is zero at the start), in another order of summation."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and how many steps of it make a round of a few seconds."""

    hidden_size: int
    layers: int
    steps_per_round: int


FULL = (
    Size(hidden_size=128, layers=4, steps_per_round=20),
    Size(hidden_size=256, layers=4, steps_per_round=12),
    Size(hidden_size=512, layers=8, steps_per_round=5),
)
SHORT = (Size(hidden_size=128, layers=4, steps_per_round=8),)
FULL_ROUNDS, SHORT_ROUNDS = 5, 2


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the smallest model, two rounds")
    parser.add_argument("--threads", type=int, nargs="+", help="of either side; default: 1, and all cores")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_overhead.json")
    arguments = parser.parse_args()
    sizes, num_rounds = (SHORT, SHORT_ROUNDS) if arguments.short else (FULL, FULL_ROUNDS)
    logging.getLogger("tinker").setLevel(logging.ERROR)
    machine, load_before = machine_facts(PACKAGES), load_average()
    counts = arguments.threads or sorted({1, os.cpu_count() or 1})
    cells = [measure_size(size, num_rounds=num_rounds, threads=count) for count in counts for size in sizes]
    result = {
        "benchmark": "step_overhead",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "datums": NUM_DATUMS,
            "tokens_per_datum": TOKENS_PER_DATUM,
            "rank": RANK,
            "rounds": num_rounds,
        },
        "cells": cells,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.output}")


def measure_size(size: Size, *, num_rounds: int, threads: int) -> dict[str, object]:
    """Runs both loops on one model, in turns."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        texts = TEXTS.read_text(encoding="utf-8").splitlines()
        model = make_tiny_model(home / "model", texts=texts, hidden_size=size.hidden_size, layers=size.layers)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        datums = make_batch(num_datums=NUM_DATUMS, tokens_per_datum=TOKENS_PER_DATUM, vocab_size=vocab_size, seed=1)
        peft = stack.enter_context(PeftLoop(model, plain(datums), rank=RANK, threads=threads))
        settings = {"TWINKLE_THREADS": str(threads), "TWINKLE_MODEL_NAME": "tiny"}
        service = stack.enter_context(TwinkleService(home / "home", model=str(model), settings=settings))
        client = tinker.ServiceClient(base_url=service.url, api_key=service.create_key())
        adapter = client.create_lora_training_client(base_model="tiny", rank=RANK, seed=0).result()
        check_same_start(peft.run(WARM_UP_STEPS), train(adapter, datums, WARM_UP_STEPS))
        rounds: list[tuple[list[Step], list[Step]]] = []
        cpu_ms = []
        for number in range(num_rounds):
            plain_steps = peft.run(size.steps_per_round) if number % 2 == 0 else []
            before = cpu_by_process(service)
            served_steps = train(adapter, datums, size.steps_per_round)
            cpu_ms.append(cpu_ms_per_step(before, cpu_by_process(service), size.steps_per_round))
            rounds.append((plain_steps or peft.run(size.steps_per_round), served_steps))
            name = f"hidden {size.hidden_size}, {size.layers} layers, {threads} threads, round {number + 1}"
            print(f"{name}: {round_summary(*rounds[-1])}", flush=True)
    return {
        "threads": threads,
        "hidden_size": size.hidden_size,
        "layers": size.layers,
        "vocab_size": vocab_size,
        **size_summary(rounds),
        "cpu_ms": {"peft": peft_cpu_ms(rounds), "service": median_of(cpu_ms)},
        "rounds": [round_summary(*one_round) for one_round in rounds],
        "load_average": load_average(),
    }


def train(adapter: tinker.TrainingClient, datums: list[tinker.Datum], num_steps: int) -> list[Step]:
    """Trains through the service; both operations of a step are submitted before the first is awaited."""
    adam = adam_params()
    steps = []
    for _ in range(num_steps):
        started = time.perf_counter()
        forward_backward = adapter.forward_backward(datums, "cross_entropy")
        optim_step = adapter.optim_step(adam)
        loss = forward_backward.result().metrics["loss:sum"]
        passed = time.perf_counter()
        optim_step.result()
        ended = time.perf_counter()
        steps.append(
            Step(seconds=ended - started, forward_backward_s=passed - started, optim_step_s=ended - passed, loss=loss)
        )
    return steps


def cpu_by_process(service: TwinkleService) -> dict[str, float]:
    """Returns the CPU seconds so far of the service's processes and of this one, the client."""
    return {"client": time.process_time(), **service.cpu_s()}


def cpu_ms_per_step(before: Mapping[str, float], after: Mapping[str, float], num_steps: int) -> dict[str, float]:
    """Returns what each process used, and their sum, in milliseconds per step."""
    used = {role: 1000 * (after[role] - before.get(role, 0.0)) / num_steps for role in after}
    return {role: rounded(value) for role, value in {**used, "all": sum(used.values())}.items()}


def peft_cpu_ms(rounds: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> float:
    """Returns the median CPU milliseconds of a plain step."""
    return rounded(1000 * statistics.median(step.cpu_s for plain_round, _ in rounds for step in plain_round))


def plain(datums: Sequence[tinker.Datum]) -> PlainBatch:
    """Returns the same tokens as lists."""
    return PlainBatch(
        inputs=[datum.model_input.to_ints() for datum in datums],
        targets=[[int(token) for token in datum.loss_fn_inputs["target_tokens"].data] for datum in datums],
    )


def check_same_start(plain_steps: Sequence[Step], served_steps: Sequence[Step]) -> None:
    """Raises RuntimeError unless the first losses agree: else the two would not be doing the same work."""
    expected, got = plain_steps[0].loss, served_steps[0].loss
    if abs(expected - got) > LOSS_TOLERANCE * abs(expected):
        raise RuntimeError(f"the first loss is {got} through the service and {expected} in plain PEFT")


def round_summary(plain_steps: Sequence[Step], served_steps: Sequence[Step]) -> dict[str, float]:
    """Returns the medians of one round in milliseconds, and their ratio."""
    plain_ms, served_ms = median_ms(plain_steps), median_ms(served_steps)
    return {"peft_ms": plain_ms, "service_ms": served_ms, "ratio": rounded(served_ms / plain_ms)}


def size_summary(rounds: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> dict[str, object]:
    """Returns the medians over all rounds: of the steps, of their parts, and of the rounds' ratios."""
    plain_steps = [step for plain_round, _ in rounds for step in plain_round]
    served_steps = [step for _, served_round in rounds for step in served_round]
    ratios = [round_summary(*one_round)["ratio"] for one_round in rounds]
    return {
        "peft_ms": median_ms(plain_steps),
        "service_ms": median_ms(served_steps),
        "ratio": rounded(statistics.median(ratios)),
        "ratio_range": [min(ratios), max(ratios)],
        "parts_ms": {"peft": parts_ms(plain_steps), "service": parts_ms(served_steps)},
    }


def median_ms(steps: Sequence[Step]) -> float:
    """Returns the median step in milliseconds."""
    return rounded(1000 * statistics.median(step.seconds for step in steps))


def parts_ms(steps: Sequence[Step]) -> dict[str, float]:
    """Returns the median of each part. Through the service, a part ends when its ``result()`` returns."""
    return {
        "forward_backward": rounded(1000 * statistics.median(step.forward_backward_s for step in steps)),
        "optim_step": rounded(1000 * statistics.median(step.optim_step_s for step in steps)),
    }


if __name__ == "__main__":
    main()
