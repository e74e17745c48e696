"""Tokens per second of training on pictures: features kept, made anew, tenant by tenant, and in plain PEFT.

    python benchmarks/pictures.py [--short] [--threads N] [--output FILE]

Each tenant brings one picture among some text a pass, forward and backward. A frozen tower need not see a picture
twice, so what counts is how much is won over making its features anew, as plain PEFT does in each step. Ways take turns
in one process, so that a busy machine is busy for all.

Shapes: N tokens.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from machine import load_average, machine_facts, write_result
from measures import rounded
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.model.pictures import Picture
from twinkle.module.lora import LoraConfig

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "numpy")
VOCAB_SIZE, IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 1024, 1020, 1021, 1022, 1023
TEXT_TOKENS, RANK = 64, 16
PATCH_SIZE, MERGE_SIZE = 16, 2
TENANTS = (1, 4, 16)
LOSS_TOLERANCE = 1e-3

Way = Callable[[int], float]
"""One pass of so many tenants; the sum of their losses."""


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, small pictures, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--output", type=Path, default=RESULTS / "pictures.json")
    arguments = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(arguments.threads)
    machine, load_before, started = machine_facts(PACKAGES), load_average(), time.monotonic()
    side, num_rounds, tenants = (64, 2, TENANTS[:2]) if arguments.short else (256, 7, TENANTS)
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home:
        make_model(Path(home), short=arguments.short)
        data = [make_datum(number, side) for number in range(max(tenants))]
        ways = {**engine_ways(Path(home), data), "peft": peft_way(Path(home), data)}
        cells = [measure(ways, num, num * len(data[0].tokens), num_rounds) for num in tenants]
        config = json.loads((Path(home) / "config.json").read_text())
    result = {
        "benchmark": "pictures",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "duration_s": round(time.monotonic() - started),
        "workload": {
            "family": config["model_type"],
            "hidden_size": config["text_config"]["hidden_size"],
            "layers": config["text_config"]["num_hidden_layers"],
            "tower_layers": config["vision_config"]["depth"],
            "picture": [side, side],
            "picture_tokens": data[0].pictures[0].num_tokens,
            "text_tokens": TEXT_TOKENS,
            "rank": RANK,
            "threads": arguments.threads,
            "rounds": num_rounds,
        },
        "cells": cells,
    }
    write_result(arguments.output, result)


def make_model(folder: Path, *, short: bool) -> None:
    """A Qwen3-VL of random weights with its image processor."""
    hidden, layers = (64, 2) if short else (256, 4)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 16,
            "num_key_value_heads": hidden // 32,
            "head_dim": 16,
            "eos_token_id": 2,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": layers,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_heads": hidden // 32,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "out_hidden_size": hidden,
            "num_position_embeddings": 1024,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE).save_pretrained(folder)


def make_datum(number: int, side: int) -> Datum:
    """Text with one square picture in it, of a tenant's own."""
    rng = np.random.default_rng(number)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, format="PNG")
    num_tokens = (side // (PATCH_SIZE * MERGE_SIZE)) ** 2
    text_N = rng.integers(3, IMAGE_TOKEN, TEXT_TOKENS)
    tokens_N = np.concatenate([text_N[:8], [VISION_START], [IMAGE_TOKEN] * num_tokens, [VISION_END], text_N[8:]])
    inputs = {
        "target_tokens": rng.integers(3, IMAGE_TOKEN, len(tokens_N)),
        "weights": np.ones(len(tokens_N), dtype=np.float32),
    }
    return Datum(tokens_N, inputs, (Picture(9, num_tokens, file.getvalue(), f"tenant{number}"),))


def engine_ways(folder: Path, data: Sequence[Datum]) -> dict[str, Way]:
    """Our engine: features kept, made anew each pass, and kept but tenant by tenant."""
    model = FusedLoraModel.from_pretrained(str(folder))
    encoder = model.pictures
    if encoder is None:
        raise RuntimeError("the model takes no pictures: its image processor was not found")
    jobs = [TrainJob(model.create_adapter(LoraConfig(rank=RANK, seed=0)), (datum,), "cross_entropy") for datum in data]

    def run(calls: Sequence[Sequence[TrainJob]]) -> float:
        total = 0.0
        for outcome in (outcome for call in calls for outcome in model.forward_backward(call)):
            if isinstance(outcome, Exception):
                raise outcome
            total += outcome.loss
        for job in jobs:
            job.adapter.clear_gradients()
        return total

    def made_anew(num: int) -> float:
        encoder.clear()
        return run([jobs[:num]])

    return {
        "kept": lambda num: run([jobs[:num]]),
        "made_anew": made_anew,
        "one_by_one": lambda num: run([[job] for job in jobs[:num]]),
    }


def peft_way(folder: Path, data: Sequence[Datum]) -> Way:
    """Plain PEFT, one adapter after the other, each through the whole model. Pictures are decoded off the clock."""
    base: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=r".*language_model.*_proj"))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    prepared = []
    for datum in data:
        tokens = torch.from_numpy(datum.tokens)[None]
        image = Image.open(io.BytesIO(bytes(datum.pictures[0].content)))  # type: ignore[arg-type]
        kinds = (tokens == IMAGE_TOKEN).int()
        prepared.append({"input_ids": tokens, "mm_token_type_ids": kinds, **processor([image], return_tensors="pt")})

    def run(num: int) -> float:
        total = 0.0
        for datum, inputs in zip(data[:num], prepared, strict=False):
            targets = torch.from_numpy(datum.inputs["target_tokens"])
            loss = torch.nn.functional.cross_entropy(adapted(**inputs).logits[0], targets, reduction="sum")
            loss.backward()
            total += loss.item()
        adapted.zero_grad()
        return total

    return run


def measure(ways: Mapping[str, Way], tenants: int, num_tokens: int, num_rounds: int) -> dict[str, object]:
    """Tokens per second of each way, and how much quicker kept features are, round by round."""
    losses = {name: way(tenants) for name, way in ways.items()}
    if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE * max(losses.values()):
        raise RuntimeError(f"the ways do not compute the same: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way(tenants)
            seconds[name].append(time.perf_counter() - began)
    ratios = {
        name: rounded(statistics.median(other / kept for other, kept in zip(taken, seconds["kept"], strict=True)))
        for name, taken in seconds.items()
        if name != "kept"
    }
    return {
        "tenants": tenants,
        "tokens_per_s": {name: rounded(num_tokens / statistics.median(taken)) for name, taken in seconds.items()},
        "kept_is_quicker_than": ratios,
    }


if __name__ == "__main__":
    main()
