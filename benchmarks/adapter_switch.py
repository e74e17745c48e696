"""What it costs to bring another tenant's adapter to work, from each place it can be in, against PEFT's own switches.

    python benchmarks/adapter_switch.py [--short] [--output FILE]

One base, adapters of one rank that train (weights, gradient and both moments). A switch is measured from "not here" to
"a pass could start"; each is also given as a share of a small training pass, since that is what a scheduler weighs.
Ways take turns, so that a busy machine is busy for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from fusion import make_model
from machine import load_average, machine_facts, write_result
from measures import rounded
from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.checkpoint_engine.snapshot import restore, snapshot
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob
from twinkle.module.lora import LoraAdapter, LoraConfig

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "numpy")
RANKS = (8, 32, 64)
PASS_TOKENS = 128
ROUNDS = 15
NUM_PEFT_ADAPTERS = 4

Way = Callable[[], object]


def main() -> None:
    """Measures, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, one rank, few rounds")
    parser.add_argument("--output", type=Path, default=RESULTS / "adapter_switch.json")
    arguments = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(1)
    machine, load_before = machine_facts(PACKAGES), load_average()
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home:
        path = make_model(Path(home) / "model", short=arguments.short)
        config = json.loads((path / "config.json").read_text())
        ranks, rounds = (RANKS[:1], 5) if arguments.short else (RANKS, ROUNDS)
        rows = [measure(path, Path(home) / f"rank-{rank}", rank, rounds) for rank in ranks]
    result = {
        "benchmark": "adapter_switch",
        "machine": machine,
        "load_average": {"before": load_before, "after": load_average()},
        "workload": {
            "hidden_size": config["hidden_size"],
            "layers": config["num_hidden_layers"],
            "vocab_size": config["vocab_size"],
            "pass_tokens": PASS_TOKENS,
            "rounds": rounds,
        },
        "rows": rows,
    }
    write_result(arguments.output, result)


def measure(path: Path, folder: Path, rank: int, rounds: int, device: str = "cpu") -> dict[str, object]:
    """Measures every way of switching for adapters of one rank; medians in milliseconds."""
    model = FusedLoraModel.from_pretrained(str(path), device=device)
    adapter = model.create_adapter(LoraConfig(rank=rank, seed=1))
    folder.mkdir()
    ways = {**our_ways(model, adapter, folder), **peft_ways(path, folder, adapter, model.device)}
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in times.items()}
    of_a_pass = {f"{name}_of_a_pass": medians[name] / medians["pass"] for name in medians if name != "pass"}
    sizes = {"rank": rank, "adapter_mib": adapter.size_bytes / 2**20}
    return {name: rounded(value) for name, value in {**sizes, **medians, **of_a_pass}.items()}


def our_ways(model: FusedLoraModel, adapter: LoraAdapter, folder: Path) -> Mapping[str, Way]:
    """A pass for comparison; parking and coming back; the same through a file that is flushed."""
    tokens = np.arange(PASS_TOKENS + 1) % model.info.vocab_size
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(PASS_TOKENS, np.float32)}
    job = TrainJob(adapter, (Datum(tokens=tokens[:-1], inputs=inputs),), "cross_entropy")
    file = folder / "snapshot"
    parked = snapshot(adapter, model.determinism)

    def evict() -> None:
        with file.open("wb") as stored:
            stored.write(snapshot(adapter, model.determinism))
            stored.flush()
            os.fsync(stored.fileno())

    def run_pass() -> None:
        model.forward_backward([job])
        adapter.clear_gradients()

    return {
        "pass": run_pass,
        "create": lambda: model.create_adapter(adapter.config),
        "park": lambda: snapshot(adapter, model.determinism),
        "unpark": lambda: restore(model.pool, parked, model.determinism),
        "evict": evict,
        "restore": lambda: restore(model.pool, file.read_bytes(), model.determinism),
    }


def peft_ways(path: Path, folder: Path, adapter: LoraAdapter, device: torch.device) -> Mapping[str, Way]:
    """Switching between loaded adapters in plain PEFT, and loading one from its files, without optimizer state."""
    import peft  # noqa: PLC0415 - takes a second, which our side does without
    import transformers  # noqa: PLC0415

    saved = folder / "peft"
    saved.mkdir()
    for name, content in export_adapter(adapter, str(path)).items():
        (saved / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(path).to(device)
    wrapped = peft.PeftModel.from_pretrained(base, saved, adapter_name="0", is_trainable=True)
    for number in range(1, NUM_PEFT_ADAPTERS):
        wrapped.load_adapter(saved, adapter_name=str(number), is_trainable=True)
    turn = 0

    def switch() -> None:
        nonlocal turn
        turn = (turn + 1) % NUM_PEFT_ADAPTERS
        wrapped.set_adapter(str(turn))

    def load() -> None:
        wrapped.delete_adapter("1")
        wrapped.load_adapter(saved, adapter_name="1", is_trainable=True)

    return {"peft_switch": switch, "peft_load": load}


if __name__ == "__main__":
    main()
