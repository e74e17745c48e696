"""A training step through the Twinkle dialect, against the Tinker one and against upstream's server.

    python benchmarks/dialects.py [--short] [--upstream URL] [--upstream-model NAME] [--output FILE]

One service, one batch, a forward_backward and an optimizer step. The Tinker SDK sends both and waits for both; calls of
the Twinkle dialect wait one after the other (`twinkle`), or are handed over together (`twinkle, futures`). The sides
take turns step by step, so that a busy machine is busy for all. Upstream's server, where one is given (its mock mode
computes nothing), is compared with the engine that computes nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tinker

from machine import load_average, machine_facts, write_result
from measures import rounded
from stack import TwinkleService, end_in_order_on_sigterm
from twinkle.hub.tiny import make_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.model import MultiLoraTransformersModel
from workload import LEARNING_RATE, adam_params, make_batch

RESULTS = Path(__file__).parent / "results"
TEXTS = Path(__file__).parents[1] / "examples" / "data" / "self_cognition.jsonl"
PACKAGES = ("tinker", "httpx", "torch", "pydantic")
NUM_DATUMS, TOKENS_PER_DATUM, RANK = 4, 64, 8
WARM_UP_STEPS = 5
STEPS, SHORT_STEPS = 100, 20
COMPARED_WITH = "tinker"
NAME = "bench"
CONFIG: Mapping[str, Any] = {"r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}

Step = Callable[[], object]


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few steps")
    parser.add_argument("--upstream", default="", help="where a server of twinkle-kit listens")
    parser.add_argument("--upstream-model", default="mock-model", help="what it calls its base model")
    parser.add_argument("--output", type=Path, default=RESULTS / "dialects.json")
    arguments = parser.parse_args()
    end_in_order_on_sigterm()
    logging.getLogger("tinker").setLevel(logging.ERROR)
    machine, load_before = machine_facts(PACKAGES), load_average()
    steps = SHORT_STEPS if arguments.short else STEPS
    cells = [
        measure(engine, num_steps=steps, upstream=arguments.upstream, upstream_model=arguments.upstream_model)
        for engine in ("null", "transformers")
    ]
    result = {
        "benchmark": "dialects",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {"datums": NUM_DATUMS, "tokens_per_datum": TOKENS_PER_DATUM, "rank": RANK},
        "cells": cells,
    }
    write_result(arguments.output, result)


def measure(engine: str, *, num_steps: int, upstream: str, upstream_model: str) -> dict[str, object]:
    """Trains an adapter on each side, in turns."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkle-bench-")))
        texts = TEXTS.read_text(encoding="utf-8").splitlines()
        model = make_tiny_model(home / "model", texts=texts, hidden_size=64, layers=2)
        settings = {"TWINKLE_THREADS": "1", "TWINKLE_MODEL_NAME": "tiny"}
        service = stack.enter_context(TwinkleService(home / "home", model=str(model), engine=engine, settings=settings))
        key = service.create_key()
        batch = make_batch(
            num_datums=NUM_DATUMS,
            tokens_per_datum=TOKENS_PER_DATUM,
            vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
            seed=1,
        )
        ours = stack.enter_context(TwinkleClient(service.url, key))
        sides: dict[str, Step] = {
            "tinker": tinker_step(service.url, key, batch),
            "twinkle": twinkle_step(ours, "tiny", batch),
            "twinkle, futures": handed_over_step(ours, "tiny", batch),
        }
        if upstream and engine == "null":
            theirs = stack.enter_context(TwinkleClient(upstream, "EMPTY_TOKEN"))
            sides["upstream"] = twinkle_step(theirs, upstream_model, batch)
        seconds = take_turns(sides, num_steps)
    cell = {"engine": engine, "steps": num_steps, "load_average": load_average(), "sides": compared(seconds)}
    print(json.dumps(cell), flush=True)
    return cell


def tinker_step(url: str, key: str, batch: list[tinker.Datum]) -> Step:
    """A step through the official SDK."""
    run = tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client("tiny", rank=RANK, seed=0)

    def step() -> None:
        passed, stepped = run.forward_backward(batch, "cross_entropy"), run.optim_step(adam_params())
        passed.result()
        stepped.result()

    return step


def twinkle_step(client: TwinkleClient, model_name: str, batch: list[tinker.Datum]) -> Step:
    """A step through calls that wait."""
    model, rows = prepared(client, model_name, "waiting"), rows_of(batch)

    def step() -> None:
        model.forward_backward(inputs=rows)
        model.clip_grad_and_step()

    return step


def handed_over_step(client: TwinkleClient, model_name: str, batch: list[tinker.Datum]) -> Step:
    """The same calls, the second not waiting for the first."""
    model, rows = prepared(client, model_name, "handed-over"), rows_of(batch)

    def step() -> None:
        passed, stepped = model.submit.forward_backward(inputs=rows), model.submit.clip_grad_and_step()
        passed.result()
        stepped.result()

    return step


def prepared(client: TwinkleClient, model_name: str, adapter: str) -> MultiLoraTransformersModel:
    """A model with an adapter that can be trained."""
    model = MultiLoraTransformersModel(model_name, connection=client.connection)
    model.add_adapter_to_model(adapter, dict(CONFIG))
    model.set_loss("CrossEntropyLoss", reduction="sum")
    model.set_optimizer("AdamW", lr=LEARNING_RATE)
    return model


def rows_of(batch: list[tinker.Datum]) -> list[dict[str, list[int]]]:
    """The same tokens and targets, as rows."""
    return [
        {
            "input_ids": datum.model_input.to_ints(),
            "labels": [int(token) for token in datum.loss_fn_inputs["target_tokens"].data],
        }
        for datum in batch
    ]


def take_turns(sides: Mapping[str, Step], num_steps: int) -> dict[str, list[float]]:
    """How long each step of each side took."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(WARM_UP_STEPS + num_steps):
        for side in sides if number % 2 else reversed(list(sides)):
            started = time.perf_counter()
            sides[side]()
            if number >= WARM_UP_STEPS:
                seconds[side].append(time.perf_counter() - started)
    return seconds


def compared(seconds: Mapping[str, list[float]]) -> dict[str, object]:
    """Of each side the median step, and its ratio to the Tinker dialect's step of the same turn."""
    told: dict[str, object] = {}
    for side, times in seconds.items():
        ratios = [one / other for one, other in zip(times, seconds[COMPARED_WITH], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        told[side] = {
            "step_ms": rounded(1000 * statistics.median(times)),
            "ratio": rounded(middle),
            "ratio_quartiles": [rounded(low), rounded(high)],
        }
    return told


if __name__ == "__main__":
    main()
