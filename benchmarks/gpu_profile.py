"""What a fused pass and a step of tokens are made of on a device: kernels, launches, waits, and who takes the time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from fusion_sides import EngineSide, Load
from measures import rounded
from twinkle.sampler import SampleRequest, SteppedTorchSampler

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = "called a synchronizing"
"""What torch's warning about one says."""
SHOWN = 8
PROMPT_TOKENS = 64
SEQUENCES = 16
WARM_UP = 8
"""A step is a graph by then."""
TIMED = 5


def profiles(model: Path, loads: Sequence[Load], device: str) -> list[dict[str, object]]:
    """One cell for a fused pass of each load, and one for a step that draws a token for each of 16 sequences."""
    side = EngineSide(model, 1, "strict", device)
    cells = []
    for load in loads:
        side.prepare(load)

        def one_pass(load: Load = load) -> None:
            side.run(load, "fused")
            side.forget()

        cells.append({"what": "pass", "tenants": load.tenants, "tokens": load.tokens, **_looked_at(one_pass, device)})
    sampler = SteppedTorchSampler(side.model, slots=SEQUENCES)
    rng = np.random.default_rng(0)
    for number in range(SEQUENCES):
        sampler.add(
            SampleRequest(
                key=str(number),
                adapter=side.adapters[number % len(side.adapters)],
                prompt=tuple(rng.integers(3, 500, PROMPT_TOKENS).tolist()),
                seed=number,
                max_tokens=PROMPT_TOKENS,
                stop_token_ids=frozenset(),
            )
        )
    cells.append({"what": "token", "sequences": SEQUENCES, **_looked_at(sampler.step, device)})
    return cells


def _looked_at(act: Callable[[], object], device: str) -> dict[str, object]:
    for _ in range(WARM_UP):
        act()
    times = []
    for _ in range(TIMED):
        _settle(device)
        started = time.perf_counter()
        act()
        _settle(device)
        times.append(time.perf_counter() - started)
    found: dict[str, object] = {"ms": rounded(1000 * sorted(times)[TIMED // 2])}
    if device == "cuda":
        found["waits"] = _num_waits(act)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        act()
        _settle(device)
    rows = recorded.key_averages()
    found["launches"] = sum(row.count for row in rows if row.key in LAUNCHES)
    # Kernels alone: the operations that launched them are counted with the same time.
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA]
    found["device_ms"] = rounded(sum(row.self_device_time_total for row in kernels) / 1000)
    for name, time_of, of_rows in (
        ("device_top", "self_device_time_total", kernels),
        ("host_top", "self_cpu_time_total", rows),
    ):
        most = sorted(of_rows, key=lambda row: -getattr(row, time_of))[:SHOWN]
        found[name] = [[row.key[:80], rounded(getattr(row, time_of) / 1000), row.count] for row in most]
    return found


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _num_waits(act: Callable[[], object]) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(WAITS in str(each.message) for each in seen)
