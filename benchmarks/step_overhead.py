"""What a training step through the service costs, against the same step in plain PEFT in one process.

    python benchmarks/step_overhead.py [--short] [--threads N ...] [--model FOLDER] [--device DEVICE] [--output FILE]

Same tiny Qwen3 models with random weights, same tokens, rank, loss and optimizer, same number of threads. Both are
alive all the time and take turns step by step, so that a busy machine is busy for both; what counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import tinker

from machine import load_average, machine_facts, write_result
from measures import rounded
from peft_loop import PeftLoop, PlainBatch, Step
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.hub.tiny import make_tiny_model
from workload import adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("tinker", "torch", "transformers", "peft", "numpy")
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
NUM_DATUMS = 8
TOKENS_PER_DATUM = 128
RANK = 16
WARM_UP_STEPS = 3
LOSS_TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}
"""Relative. Both compute from the same weights (B is zero at the start), in another order of summation; on a CPU in
float32, on a GPU in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how many steps each side makes with it; ``folder`` is that of a model that is there already."""

    hidden_size: int
    layers: int
    num_steps: int
    folder: Path | None = None


FULL = (
    Size(hidden_size=128, layers=4, num_steps=100),
    Size(hidden_size=256, layers=4, num_steps=60),
    Size(hidden_size=512, layers=8, num_steps=24),
)
SHORT = (Size(hidden_size=128, layers=4, num_steps=16),)


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the smallest model, few steps")
    # More than one wants an idle machine: threads that wait for a preempted one would be all that is measured.
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of torch, on either side")
    parser.add_argument("--model", type=Path, help="a base model's folder, instead of the tiny ones")
    parser.add_argument("--device", choices=list(LOSS_TOLERANCE), default="cpu", help="of both sides")
    parser.add_argument("--output", type=Path, default=RESULTS / "step_overhead.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    sizes = SHORT if arguments.short else FULL
    if arguments.model is not None:
        sizes = (size_of(arguments.model, num_steps=sizes[0].num_steps),)
    logging.getLogger("tinker").setLevel(logging.ERROR)
    machine, load_before = machine_facts(PACKAGES), load_average()
    cells = [
        measure_size(size, threads=threads, device=arguments.device) for threads in arguments.threads for size in sizes
    ]
    result = {
        "benchmark": "step_overhead",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "datums": NUM_DATUMS,
            "tokens_per_datum": TOKENS_PER_DATUM,
            "rank": RANK,
        },
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure_size(size: Size, *, threads: int, device: str = "cpu") -> dict[str, object]:
    """Runs both loops on one model, in turns."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        texts = TEXTS.read_text(encoding="utf-8").splitlines()
        model = size.folder or make_tiny_model(
            home / "model", texts=texts, hidden_size=size.hidden_size, layers=size.layers
        )
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        datums = make_batch(num_datums=NUM_DATUMS, tokens_per_datum=TOKENS_PER_DATUM, vocab_size=vocab_size, seed=1)
        peft = stack.enter_context(PeftLoop(model, plain(datums), rank=RANK, threads=threads, device=device))
        settings = {"TWINKLE_THREADS": str(threads), "TWINKLE_MODEL_NAME": "tiny", "TWINKLE_DEVICE": device}
        service = stack.enter_context(TwinkleService(home / "home", model=str(model), settings=settings))
        client = tinker.ServiceClient(base_url=service.url, api_key=service.create_key())
        adapter = client.create_lora_training_client(base_model="tiny", rank=RANK, seed=0).result()
        check_same_start(
            peft.run(WARM_UP_STEPS), train(adapter, datums, WARM_UP_STEPS), tolerance=LOSS_TOLERANCE[device]
        )
        plain_steps: list[Step] = []
        served_steps: list[Step] = []
        for number in range(size.num_steps):
            if number % 2 == 0:
                plain_steps += peft.run(1)
            served_steps.append(served_step(service, adapter, datums))
            if number % 2 == 1:
                plain_steps += peft.run(1)
    cell = {
        "threads": threads,
        "device": device,
        "hidden_size": size.hidden_size,
        "layers": size.layers,
        "vocab_size": vocab_size,
        **size_summary(plain_steps, served_steps),
        "load_average": load_average(),
    }
    print(cell, flush=True)
    return cell


def size_of(folder: Path, *, num_steps: int) -> Size:
    """Returns what a model's config says of it."""
    config = json.loads((folder / "config.json").read_text())
    return Size(
        hidden_size=config["hidden_size"], layers=config["num_hidden_layers"], num_steps=num_steps, folder=folder
    )


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


def served_step(service: TwinkleService, adapter: tinker.TrainingClient, datums: list[tinker.Datum]) -> Step:
    """One step through the service, with the CPU time of all its processes and of this one."""
    before = time.process_time() + sum(service.cpu_s().values())
    step = train(adapter, datums, 1)[0]
    return replace(step, cpu_s=time.process_time() + sum(service.cpu_s().values()) - before)


def plain(datums: Sequence[tinker.Datum]) -> PlainBatch:
    """Returns the same tokens as lists."""
    return PlainBatch(
        inputs=[datum.model_input.to_ints() for datum in datums],
        targets=[[int(token) for token in datum.loss_fn_inputs["target_tokens"].data] for datum in datums],
    )


def check_same_start(
    plain_steps: Sequence[Step], served_steps: Sequence[Step], *, tolerance: float = LOSS_TOLERANCE["cpu"]
) -> None:
    """Raises RuntimeError unless the first losses agree: else the two would not be doing the same work."""
    expected, got = plain_steps[0].loss, served_steps[0].loss
    if abs(expected - got) > tolerance * abs(expected):
        raise RuntimeError(f"the first loss is {got} through the service and {expected} in plain PEFT")


def size_summary(plain_steps: Sequence[Step], served_steps: Sequence[Step]) -> dict[str, object]:
    """Returns medians, and the ratio of each step to the one beside it: its median and its quartiles.

    CPU times are means: the kernel counts those of other processes in ticks of 10 ms.
    """
    ratios = [served.seconds / plain.seconds for plain, served in zip(plain_steps, served_steps, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain_cpu_ms, served_cpu_ms = mean_cpu_ms(plain_steps), mean_cpu_ms(served_steps)
    return {
        "steps": len(ratios),
        "peft_ms": rounded(1000 * statistics.median(step.seconds for step in plain_steps)),
        "service_ms": rounded(1000 * statistics.median(step.seconds for step in served_steps)),
        "ratio": rounded(middle),
        "ratio_quartiles": [rounded(low), rounded(high)],
        "cpu_ms": {"peft": rounded(plain_cpu_ms), "service": rounded(served_cpu_ms)},
        "cpu_ratio": rounded(served_cpu_ms / plain_cpu_ms) if plain_cpu_ms else 0.0,
        "parts_ms": {"peft": parts_ms(plain_steps), "service": parts_ms(served_steps)},
    }


def mean_cpu_ms(steps: Sequence[Step]) -> float:
    """Returns the mean CPU milliseconds of a step."""
    return 1000 * statistics.fmean(step.cpu_s for step in steps)


def parts_ms(steps: Sequence[Step]) -> dict[str, float]:
    """Returns the median of each part. Through the service, a part ends when its ``result()`` returns."""
    return {
        "forward_backward": rounded(1000 * statistics.median(step.forward_backward_s for step in steps)),
        "optim_step": rounded(1000 * statistics.median(step.optim_step_s for step in steps)),
    }


if __name__ == "__main__":
    main()
