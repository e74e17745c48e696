"""The engine on a GPU, in one command and ten minutes: its tests there, what it is worth against plain PEFT, and goals.

    python benchmarks/gpu.py [--device cuda] [--size 4b] [--short] [--parts PART ... [--add]] [--budget-s 540]
                             [--output FILE]

It needs torch, transformers, peft, pytest and psutil, and none of the queue's packages; where these are there, a step
through the service is measured, too, and what the queue costs; where vLLM is, it samples beside ours. The model has the
shape of Qwen3-0.6B (``--size 4b``: of Qwen3-4B) and random weights. Whatever was measured is written at once, so that a
run that is cut short leaves what it has; parts that no time was left for are named.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import adapter_switch
import sampling
from fusion import check_same_loss, speed_ratio, tokens_per_s
from fusion_sides import ENGINE_WAYS, PEFT_WAYS, Ask, EngineSide, Load, Pass, PeftSide, SideProcess, Way
from gpu_goals import as_json, goals_of, peak_share
from gpu_profile import profiles
from gpu_scale import FULL, LARGER, SHORT, Scale
from machine import load_average, machine_facts
from measures import rounded

QUEUE_PACKAGES = ("pydantic", "pydantic_settings", "structlog", "sqlmodel", "fastapi", "celery", "redis", "tinker")
REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PACKAGES = ("torch", "transformers", "peft", "triton", "numpy")
LOSS_TOLERANCE = {"cpu": 1e-3, "cuda": 2e-2}
"""Relative. The sides sum in other orders, on a GPU in bfloat16."""
LEAST_S = 30.0
"""With less left no further part is begun."""
GRACE_S = 45.0
"""After the budget a part at work is broken off, so that the whole ends within ten minutes."""
SHARES = {"tests": 0.4, "profile": 0.3, "training": 0.5, "switching": 0.3, "sampling": 0.6}
"""Of the time left that a part may take, so that those after it have some."""


@dataclass
class Run:
    """One run of everything: what it measures on, how long it may take, what it knows so far."""

    device: str
    scale: Scale
    home: Path
    output: Path
    ends_at: float
    result: dict[str, object] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """The base model's folder."""
        return self.home / "model"

    @property
    def device_name(self) -> str:
        """What the device calls itself."""
        return torch.cuda.get_device_name(0) if self.device == "cuda" else "cpu"

    @property
    def left_s(self) -> float:
        """How much time is left."""
        return self.ends_at - time.monotonic()

    def add(self, name: str, value: object) -> None:
        """Write down what is known now."""
        self.result[name] = value
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"{name}: {json.dumps(value)}", flush=True)


Part = Callable[[Run], object]


def main() -> int:
    """Measures, writes the result; 1 where a test or a part failed, 2 where there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the parts themselves")
    parser.add_argument("--short", action="store_true", help="a tiny model, few cells, few rounds")
    parser.add_argument("--size", choices=["0.6b", *LARGER], default="0.6b", help="the shape of the base model")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="instead of all")
    parser.add_argument("--add", action="store_true", help="keep the other parts of the result that is there already")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no part begins after this")
    parser.add_argument("--output", type=Path, help="instead of results/<device>.json")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device: torch.cuda.is_available() is false; --device cpu --short tries the parts", file=sys.stderr
        )
        return 2
    name = torch.cuda.get_device_name(0) if arguments.device == "cuda" else "cpu"
    scale = SHORT if arguments.short else FULL
    if arguments.size in LARGER:
        scale = replace(scale, config=LARGER[arguments.size])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinkle-bench-") as home:
        run = Run(
            device=arguments.device,
            scale=scale,
            home=Path(home),
            output=arguments.output or RESULTS / f"{_file_name(name)}.json",
            ends_at=started + arguments.budget_s,
        )
        if arguments.add and run.output.exists():
            run.result |= json.loads(run.output.read_text())
        run.add("benchmark", "gpu")
        run.add("machine", {**machine_facts(PACKAGES), **device_facts(arguments.device)})
        run.add("load_average", load_average())
        make_model(run.model, run.scale.config, run.device)
        run.add("workload", {**run.scale.config, "dtype": "float32" if run.device == "cpu" else "bfloat16"})
        failed = run_parts(run, {name: PARTS[name] for name in arguments.parts})
        goals = goals_of(run.result)
        run.add("goals", as_json(goals))
        run.add("duration_s", {**_durations(run.result), ", ".join(arguments.parts): round(time.monotonic() - started)})
    print("\n".join(goal.line for goal in goals))
    print(f"written to {run.output}")
    return int(bool(failed))


def run_parts(run: Run, parts: Mapping[str, Part]) -> list[str]:
    """Run one part after the other while there is time; the names of those that failed.

    A part that fails is written down with its error and does not keep the others from running.
    """
    failed = []
    for name, part in parts.items():
        if run.left_s < LEAST_S:
            run.add(name, {"skipped": f"{run.left_s:.0f} s were left"})
            continue
        own = replace(run, ends_at=time.monotonic() + SHARES.get(name, 1.0) * run.left_s)
        try:
            with broken_off_after(own.left_s + GRACE_S):
                value = part(own)
        except subprocess.TimeoutExpired as error:
            value = {"failed": f"not done after {error.timeout:.0f} s"}
        except Exception as error:  # noqa: BLE001 - the border: the hour with a device is worth more than one part
            value = {"failed": f"{type(error).__name__}: {error}"}
        run.add(name, value)
        if isinstance(value, dict) and "failed" in value:
            failed.append(name)
    return failed


@contextmanager
def broken_off_after(time_s: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in what has not ended by then, wherever it waits."""

    def ring(_signal: int, _frame: object) -> None:
        raise TimeoutError("the time was up; see --budget-s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, time_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def device_facts(device: str) -> dict[str, object]:
    """What the accelerator is."""
    if device == "cpu":
        return {"device": "cpu"}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": about.name,
        "device_memory_gib": rounded(about.total_memory / 2**30),
        "compute_capability": f"{about.major}.{about.minor}",
        "devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }


def make_model(folder: Path, sizes: dict[str, int], device: str) -> None:
    """Write a model of a real shape with random weights; drawn on the device, which takes seconds."""
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


def run_tests(run: Run) -> dict[str, object]:
    """The tests of the engine on the device; on a CPU their twins."""
    tests = REPOSITORY / "tests" / "gpu"
    marked = "gpu" if run.device == "cuda" else "not gpu and not soak"
    command = [sys.executable, "-m", "pytest", "-c", str(tests / "pytest.ini"), "--confcutdir", str(tests), str(tests)]
    done = subprocess.run(
        [*command, "-m", marked, "-q", "-rs", "--maxfail=20"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=max(run.left_s, 1.0),
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    summary = lines[-1] if lines else done.stderr.strip()[-400:]
    if done.returncode == 0:
        return {"summary": summary, "skipped_tests": [line for line in lines if line.startswith("SKIPPED")]}
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))]
    return {"failed": summary, "failures": failures[:40]}


def measure_training(run: Run) -> dict[str, object]:
    """Many tenants in one pass, against the same one by one, one packed tenant, and PEFT both ways; and one tenant's
    training step, its optimizer included, against plain PEFT."""
    with (
        SideProcess(EngineSide, run.model, 1, "strict", run.device) as engine,
        SideProcess(PeftSide, run.model, 1, run.device) as peft,
    ):
        ways: tuple[Way, ...] = (*ENGINE_WAYS, *PEFT_WAYS)
        asked = [(peft if way.startswith("peft") else engine, way) for way in ways]
        step = _cells(run, run.scale.step, [(engine, "step"), (peft, "peft_step")], "step", against="peft_step")
        fusion = _cells(run, run.scale.fusion, asked, "fused", against="peft_switching")
    return {"fusion": fusion, "step": step}


def measure_queue(run: Run) -> dict[str, object]:
    """What the queue costs here: one tenant's step through the service on this device, against plain PEFT there; how
    much of the time a device that takes 5 ms a pass is at work; a call through the SDK against an empty server."""
    missing = [name for name in QUEUE_PACKAGES if find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    found: dict[str, object] = {}
    for name, options in (
        ("step_overhead", ("--model", str(run.model), "--device", run.device)),
        ("device_wait", ()),
        ("queue_overhead", ()),
    ):
        if run.left_s < LEAST_S:
            found[name] = {"skipped": f"{run.left_s:.0f} s were left"}
            continue
        found[name] = _measured_by(run, name, options)
        if "failed" in found[name]:
            found["failed"] = name
    return found


def _measured_by(run: Run, script: str, options: Sequence[str]) -> dict[str, Any]:
    """The cells of a benchmark of its own, in short."""
    output = run.home / f"{script}.json"
    done = subprocess.run(
        [sys.executable, REPOSITORY / "benchmarks" / f"{script}.py", "--short", "--output", output, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=max(run.left_s, 1.0),
    )
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout.strip())[-400:]}
    return {"cells": json.loads(output.read_text())["cells"]}


def _cells(
    run: Run, loads: Sequence[Load], asked: list[tuple[SideProcess, Way]], ours: Way, *, against: Way
) -> list[dict[str, Any]]:
    """Run every load every way, in turns; the order turns around from round to round."""
    cells: list[dict[str, Any]] = []
    ways = [way for _, way in asked]
    for load in loads:
        if run.left_s < LEAST_S:
            cells.append({"skipped": f"{load}"})
            continue
        losses = {way: side.ask(Ask(load=load, way=way)).loss for side, way in asked}
        check_same_loss(losses, reference=against, tolerance=LOSS_TOLERANCE[run.device])
        passes: dict[Way, list[Pass]] = {way: [] for way in ways}
        for _ in range(run.scale.rounds):
            for side, way in asked:
                passes[way].append(side.ask(Ask(load=load, way=way)))
            asked.reverse()
        cells.append(
            {
                "tenants": load.tenants,
                "tokens": load.tokens,
                "ms": {way: _median_ms(passes[way]) for way in ways},
                "tokens_per_s": {way: tokens_per_s(load, [one.wall_s for one in passes[way]]) for way in ways},
                f"{ours}_against": {
                    way: speed_ratio(passes[ours], passes[way], wall=True) for way in ways if way != ours
                },
                "device_mib": {way: rounded(passes[way][-1].device_bytes / 2**20) for way in ways},
            }
        )
        share = peak_share(run.scale.config, run.device_name, cells[-1]["tokens_per_s"][ours])
        if share is not None:
            cells[-1]["peak_share"] = share
        print(cells[-1], flush=True)
    return cells


def measure_sampling(run: Run) -> list[dict[str, object]]:
    """Our sampler on the base model and on a mix of adapters, against itself without graphs, transformers and PEFT."""
    rounds = sampling.measure(
        run.home,
        threads=1,
        num_tokens=run.scale.new_tokens,
        num_rounds=min(run.scale.rounds, 2),
        device=run.device,
        until=run.ends_at - LEAST_S,
    )
    return [
        sampling.cell(num_requests, run.scale.new_tokens, times)
        if times
        else {"requests": num_requests, "skipped": "no time was left"}
        for num_requests, times in rounds.items()
    ]


def measure_launches(run: Run) -> list[dict[str, object]]:
    """What a pass and a step of tokens are made of."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(profiles, run.model, (run.scale.fusion[0], run.scale.fusion[1]), run.device).result()


def measure_switching(run: Run) -> list[dict[str, object]]:
    """What it takes to bring another tenant's adapter to work, from each place that it can be in."""
    return [
        adapter_switch.measure(run.model, run.home / f"rank-{rank}", rank, 2 * run.scale.rounds, run.device)
        for rank in run.scale.ranks
    ]


PARTS: dict[str, Part] = {
    "tests": run_tests,
    "profile": measure_launches,
    "training": measure_training,
    "switching": measure_switching,
    "sampling": measure_sampling,
    "queue": measure_queue,
}


def _median_ms(passes: Sequence[Pass]) -> float:
    return rounded(1000 * statistics.median(one.wall_s for one in passes))


def _durations(result: Mapping[str, object]) -> Mapping[str, float]:
    """What earlier runs took that added to this result."""
    known = result.get("duration_s")
    return known if isinstance(known, dict) else {}


def _file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
