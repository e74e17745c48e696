"""What a step with a loss of the client's own costs when the service runs it, against the client running it.

    python benchmarks/custom_loss.py [--short] [--threads N] [--output FILE]

One service, one traced loss (clipped policy gradient, 16 operations), two adapters that start alike. One sends the
loss's id: a single pass. The other keeps the loss: a pass for the logprobs, the loss in the client, a second pass with
its gradient as weights. They take turns step by step, so that a busy machine is busy for both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import tinker
import torch

from machine import load_average, machine_facts, write_result
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.hub.tiny import make_tiny_model
from workload import adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
PACKAGES = ("tinker", "torch", "transformers", "numpy")
NUM_DATUMS = 8
TOKENS_PER_DATUM = 128
RANK = 16
WARM_UP_STEPS = 3
LOSS_TOLERANCE = 1e-4
"""Relative: both adapters start from the same weights."""
LAYERS = 4
STEPS_OF = {128: 40, 256: 24}
"""How many steps each side makes with a model of a hidden size."""


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the smallest model, few steps")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the worker")
    parser.add_argument("--output", type=Path, default=RESULTS / "custom_loss.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    logging.getLogger("tinker").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    machine, load_before = machine_facts(PACKAGES), load_average()
    steps_of = {min(STEPS_OF): 10} if arguments.short else STEPS_OF
    cells = [measure(size, num_steps=steps, threads=arguments.threads) for size, steps in steps_of.items()]
    result = {
        "benchmark": "custom_loss",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {"datums": NUM_DATUMS, "tokens_per_datum": TOKENS_PER_DATUM, "rank": RANK},
        "cells": cells,
    }
    write_result(arguments.output, result)


def clipped_policy(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """The loss both sides run: clipped importance ratios, and two metrics."""
    ratio = torch.exp(logprobs - old_logprobs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {
        "custom/clipped:mean": ((ratio - 1).abs() > 0.2).float().mean(),
        "custom/kl:mean": (old_logprobs - logprobs).mean(),
    }


def measure(hidden_size: int, *, num_steps: int, threads: int) -> dict[str, object]:
    """Trains both adapters on one model, in turns."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        texts = TEXTS.read_text(encoding="utf-8").splitlines()
        model = make_tiny_model(home / "model", texts=texts, hidden_size=hidden_size, layers=LAYERS)
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        settings = {
            "TWINKLE_THREADS": str(threads),
            "TWINKLE_MODEL_NAME": "tiny",
            "TWINKLE_CUSTOM_LOSS_SERVER_SIDE": "true",
        }
        service = stack.enter_context(TwinkleService(home / "home", model=str(model), settings=settings))
        client = tinker.ServiceClient(base_url=service.url, api_key=service.create_key())
        handle = client.create_custom_loss(clipped_policy, {"logprobs": 1, "old_logprobs": 1, "advantages": 1}).result()
        sides = {"service": handle, "client": dataclasses.replace(handle, loss_id=None)}
        adapters = {
            side: client.create_lora_training_client(base_model="tiny", rank=RANK, seed=0).result() for side in sides
        }
        batch = policy_batch(vocab_size)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        first_loss: dict[str, float] = {}
        for number in range(WARM_UP_STEPS + num_steps):
            for side in sides if number % 2 else reversed(sides):
                took_s, loss = step(adapters[side], batch, sides[side])
                first_loss.setdefault(side, loss)
                if number >= WARM_UP_STEPS:
                    seconds[side].append(took_s)
    check_same_start(first_loss)
    ratios = [ours / theirs for ours, theirs in zip(seconds["service"], seconds["client"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    cell = {
        "hidden_size": hidden_size,
        "layers": LAYERS,
        "threads": threads,
        "steps": num_steps,
        "service_ms": rounded(1000 * statistics.median(seconds["service"])),
        "client_ms": rounded(1000 * statistics.median(seconds["client"])),
        "ratio": rounded(middle),
        "ratio_quartiles": [rounded(low), rounded(high)],
        "load_average": load_average(),
    }
    print(cell, flush=True)
    return cell


def policy_batch(vocab_size: int) -> list[tinker.Datum]:
    """Returns datums whose old logprobs are about those of random weights."""
    datums = make_batch(num_datums=NUM_DATUMS, tokens_per_datum=TOKENS_PER_DATUM, vocab_size=vocab_size, seed=1)
    generator = torch.Generator().manual_seed(1)
    for datum in datums:
        noise, advantages = torch.randn(2, TOKENS_PER_DATUM, generator=generator)
        datum.loss_fn_inputs["old_logprobs"] = tinker.TensorData.from_torch(
            0.1 * noise - torch.log(torch.tensor(float(vocab_size)))
        )
        datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_torch(advantages)
    return datums


def step(adapter: tinker.TrainingClient, batch: list[tinker.Datum], loss: object) -> tuple[float, float]:
    """Makes one step, both operations submitted before the first is awaited; its seconds and its loss."""
    started = time.perf_counter()
    passed = adapter.forward_backward_custom(batch, loss)  # type: ignore[arg-type]
    stepped = adapter.optim_step(adam_params())
    value = passed.result().metrics["loss:sum"]
    stepped.result()
    return time.perf_counter() - started, value


def check_same_start(first_loss: Mapping[str, float]) -> None:
    """Raises RuntimeError unless the first losses agree: else the two would not be doing the same work."""
    ours, theirs = first_loss["service"], first_loss["client"]
    if abs(ours - theirs) > LOSS_TOLERANCE * max(abs(theirs), 1.0):
        raise RuntimeError(f"the first loss is {ours} in the service and {theirs} in the client")


if __name__ == "__main__":
    main()
