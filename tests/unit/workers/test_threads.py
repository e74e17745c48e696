"""The number of threads: measured, within the cores there are, and nothing that shows in a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from harness.models import make_text_model
from twinkle.core.adapter import AdapterConfig
from twinkle.core.settings import Settings
from twinkle.infra.rank_group import ALONE
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.wire.sampling import parse_sample
from twinkle.workers.engines import threads as threads_module
from twinkle.workers.engines import timed_passes
from twinkle.workers.engines.threads import (
    LEAST_USED,
    candidates,
    free_cores,
    kind_of_cpu,
    measure_threads,
    thread_limit,
    usable_cores,
    wait_for_cores,
)
from twinkle.workers.engines.transformers_engine import TransformersEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Other tests of this process compute with what they set."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


class Passes:
    """Passes that take as long as a test says, and how many of them were made."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self.made: list[int] = []

    def __call__(self, threads: int) -> float:
        self.made.append(threads)
        return self._seconds(threads)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        pytest.param(lambda threads: 0.01 * threads, 1, id="a small model"),
        pytest.param(lambda threads: 0.01 / threads, 8, id="one that gains from each"),
        pytest.param(lambda threads: 0.01 / min(threads, 4), 4, id="one that gains up to four"),
        pytest.param(lambda threads: 0.01 - 0.0001 * (threads == 2), 1, id="two that gain next to nothing"),
        pytest.param(lambda threads: 0.01 / threads**0.25, 4, id="one whose last doubling gains a sixth"),
    ],
)
def test_the_quickest_number_wins_and_more_threads_must_be_worth_it(
    seconds: Callable[[int], float], chosen: int
) -> None:
    assert measure_threads(Passes(seconds), 8).threads == chosen


def test_one_disturbed_pass_decides_nothing() -> None:
    disturbed = [0.2]
    passes = Passes(lambda threads: disturbed.pop() if threads == 1 and disturbed else 0.01 * threads)

    assert measure_threads(passes, 4).threads == 1


def test_a_second_that_began_disturbed_decides_by_its_quiet_end() -> None:
    disturbed = [0.1] * 4
    passes = Passes(lambda threads: disturbed.pop() if threads == 2 and disturbed else 0.01 / threads)

    assert measure_threads(passes, 2).threads == 2


def test_cores_are_waited_for_until_they_are_free_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [0.3, 1.2, 1.6, 2.0]
    monkeypatch.setattr(threads_module, "free_cores", lambda seconds: looks.pop(0))

    assert wait_for_cores(2)
    assert looks == [2.0]

    monkeypatch.setattr(threads_module, "free_cores", lambda seconds: 14.0)
    assert not wait_for_cores(16)
    assert wait_for_cores(15)


def test_cores_that_others_use_are_not_free() -> None:
    cores = sorted(os.sched_getaffinity(0))
    spin = "import os, sys; os.sched_setaffinity(0, {{{}}}); print(flush=True)\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin.format(core)], stdout=subprocess.PIPE) for core in cores]
    try:
        for process in busy:
            assert process.stdout is not None and process.stdout.readline()
        assert free_cores(0.5) < len(cores) - LEAST_USED
    finally:
        for process in busy:
            process.kill()
            process.communicate()


def test_passes_are_timed_once_cores_are_free_and_by_one_thread_not_at_all(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    said: list[object] = []
    limit = 2
    monkeypatch.setattr(timed_passes, "thread_limit", lambda ranks: limit)
    monkeypatch.setattr(timed_passes, "wait_for_cores", lambda number: said.append(f"{number} free") or True)

    def time_pass(timer: timed_passes.PassTimer, threads: int) -> float:
        said.append(threads)
        return 1.0

    monkeypatch.setattr(timed_passes.PassTimer, "__call__", time_pass)
    timed_passes.choose_threads(plain, ALONE)
    assert said[0] == "2 free" and {*said[1:]} == {1, 2}

    said.clear()
    limit = 1
    timed_passes.choose_threads(plain, ALONE)
    assert said == [] and torch.get_num_threads() == 1


def test_a_large_model_is_not_timed_with_numbers_that_can_only_be_slower() -> None:
    passes = Passes(lambda threads: 32 / threads)

    assert measure_threads(passes, 32).threads == 32
    assert passes.made == [32, 16]


def test_the_numbers_are_powers_of_two_and_the_limit() -> None:
    assert [candidates(limit) for limit in (1, 2, 6, 8)] == [[1], [2, 1], [6, 4, 2, 1], [8, 4, 2, 1]]


def test_ranks_share_what_the_api_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [thread_limit(ranks, cores=16) for ranks in (1, 2, 4, 16)] == [16, 7, 3, 1]
    assert thread_limit(2, cores=2) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [thread_limit(ranks, cores=16) for ranks in (1, 2)] == [4, 4]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000", "us/cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "max 100000", "us/cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/us/cpu.cfs_quota_us": "100000", "cpu/us/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_a_container_has_the_cores_of_its_quota(files: dict[str, str], cores: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/else\n1:cpu,cpuacct:/us\n0::/us\n")

    assert usable_cores(tmp_path, own) == (len(os.sched_getaffinity(0)) if cores is None else cores)


def test_a_process_has_the_cores_it_is_bound_to() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {next(iter(os.sched_getaffinity(0)))});"
        "from twinkle.workers.engines.threads import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_a_kind_of_cpu_is_what_it_calls_itself(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: fpu\n")
    assert kind_of_cpu(file) == "Some CPU @ 2 GHz"
    assert kind_of_cpu(tmp_path / "absent")


def test_an_engine_measures_once_and_computes_with_what_was_quickest(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(lambda threads: 0.01 / threads)
    monkeypatch.setattr(timed_passes, "thread_limit", lambda ranks: 2)
    monkeypatch.setattr(timed_passes, "wait_for_cores", lambda number: True)
    monkeypatch.setattr(timed_passes.PassTimer, "__call__", lambda timer, threads: passes(threads))

    engine = TransformersEngine.from_settings(Settings(model=str(model)))

    assert {*passes.made} == {1, 2}
    assert engine.capabilities.threads == torch.get_num_threads() == 2


def test_the_setting_overrides_and_nothing_is_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(timer: object, threads: int) -> float:
        raise AssertionError("measured")

    monkeypatch.setattr(timed_passes.PassTimer, "__call__", refuse)
    engine = TransformersEngine.from_settings(Settings(model=str(model), threads=1))

    assert engine.capabilities.threads == torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("seconds_a_pass", "seconds_a_token", "num_tokens"),
    [
        pytest.param(0.0, 1e-6, 64, id="a small model"),
        pytest.param(0.0, 3e-3, 32, id="a larger one"),
        # By what a token of a short pass takes it would be eleven.
        pytest.param(0.045, 5e-4, 64, id="one whose passes take long however short they are"),
        pytest.param(0.0, 1.0, 8, id="a large one"),
    ],
)
def test_as_many_tokens_are_timed_as_take_a_moment(
    model: Path, seconds_a_pass: float, seconds_a_token: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    timer = timed_passes.PassTimer(plain, ALONE)
    assert timer(1) > 0

    def seconds(timer: timed_passes.PassTimer, threads: int) -> float:
        return seconds_a_pass + seconds_a_token * timer._num_tokens

    monkeypatch.setattr(timed_passes.PassTimer, "__call__", seconds)

    timer.fit(1)

    assert timer._num_tokens == num_tokens


def trained_and_sampled(model: Path, threads: int) -> tuple[bytes, list[bytes]]:
    """An adapter's whole state after some steps, and samples on it and on the base model."""
    engine = TransformersEngine.from_settings(Settings(model=str(model), threads=threads))
    if engine.capabilities.determinism != "mkl-strict":
        pytest.skip("only promised in MKL's strict mode; otherwise the number that was recorded is kept to")
    adapter = engine.create(AdapterConfig(base_model="tiny", rank=8, seed=1))
    rng = np.random.default_rng(0)
    for _ in range(3):
        data = []
        for length in (300, 7, 64):
            inputs = {"target_tokens": rng.integers(0, 300, length), "weights": np.ones(length, dtype=np.float32)}
            data.append(Datum(rng.integers(0, 300, length), inputs))
        engine.model.forward_backward([TrainJob(adapter, tuple(data), "cross_entropy")])
        engine.model.optim_step(adapter, AdamParams(learning_rate=1e-2))
    body = {
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(7, 300))}]},
        "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        "seq_id": 0,
        "sampling_session_id": "s",
        "prompt_logprobs": True,
    }
    request = parse_sample(json.dumps(body).encode())
    results = {}
    for name, state in (("adapter", adapter), ("base", None)):
        engine.add_sample(name, state, request, cache_group="tenant:t")
    while engine.num_samples_under_way:
        results.update({output.request_id: output.result for output in engine.step_samples()})
    return engine.snapshot(adapter), [results["adapter"] or b"", results["base"] or b""]


def test_no_result_depends_on_the_number_of_threads(model: Path) -> None:
    assert trained_and_sampled(model, 1) == trained_and_sampled(model, 2)
