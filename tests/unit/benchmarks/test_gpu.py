"""The run for an hour with a GPU, part by part on the CPU: the hour is no time to find mistakes in it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
# What somebody adds to their pytest is for the tests around these.
_OWN = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
ENVIRONMENT = {**_OWN, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def goals() -> ModuleType:
    return importlib.import_module("gpu_goals")


def new_run(gpu: ModuleType, folder: Path, *, left_s: float) -> Any:
    ends_at = time.monotonic() + left_s
    return gpu.Run(device="cpu", scale=gpu.SHORT, home=folder, output=folder / "out.json", ends_at=ends_at)


def run_short(output: Path, *parts: str, environment: dict[str, str] = ENVIRONMENT) -> dict[str, Any]:
    command = [sys.executable, REPOSITORY / "benchmarks" / "gpu.py", "--device", "cpu", "--short", "--parts", *parts]
    done = subprocess.run(
        [*command, "--output", output], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_it_measures_and_says_on_what(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "cpu.json"
    asked = ["gpu.py", "--device", "cpu", "--short", "--parts", "switching", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", asked)

    code = gpu.main()

    result = json.loads(output.read_text())
    assert code == 0
    assert result["machine"]["device"] == "cpu"
    assert result["switching"][0]["unpark"] > 0

    assert [goal["found"] for goal in result["goals"]] == [None] * 9


@pytest.fixture
def bare(gpu: ModuleType, tmp_path: Path) -> dict[str, str]:
    """An environment in which none of the queue's packages can be imported, by no process."""
    names = {*gpu.QUEUE_PACKAGES, "sqlalchemy", "kombu", "obstore", "orjson", "httpx"}
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(names)}))\n")
    return {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"]))}


def test_it_runs_where_the_queues_packages_are_not_installed(bare: dict[str, str], tmp_path: Path) -> None:
    result = run_short(tmp_path / "cpu.json", "switching", "queue", environment=bare)

    assert result["switching"][0]["unpark"] > 0
    assert result["queue"]["skipped"].startswith("not installed: pydantic")


def test_goals_stand_beside_what_was_found(goals: ModuleType) -> None:
    fusion = [
        {"tenants": tenants, "tokens": 32, "fused_against": {"peft_switching": 9.0, "limit": limit}, "peak_share": 0.2}
        for tenants, limit in ((1, 0.5), (4, 0.95), (16, 0.85))
    ]
    result = {
        "training": {"fusion": fusion, "step": [{"tenants": 8, "step_against": {"peft_step": 1.2}}]},
        "sampling": [
            {"requests": 1, "against_wall": {"torch_base": {"launched_base": 2.9}, "torch_mix": {}}},
            {"requests": 8, "skipped": "no time was left"},
        ],
        "queue": {
            "step_overhead": {"failed": "no"},
            "device_wait": {"cells": [{"tenants": 1, "in_execute": 0.91}, {"tenants": 16, "in_execute": 0.95}]},
        },
    }

    lines = [goal.line for goal in goals.goals_of(result)]

    verdicts = [line.split()[-1] for line in lines]
    found = ["reached", "MISSED", "reached", "MISSED", "measured", "MISSED", "measured", "reached", "MISSED"]
    assert verdicts == found
    assert "16 tenants of 32 tokens" in lines[0] and "9" in lines[0]


def test_a_share_of_the_peak_is_that_of_the_products_alone(gpu: ModuleType, goals: ModuleType) -> None:
    one_tflop = 1e12 / (4 * goals.multiplied_weights(gpu.FULL.config))
    assert goals.peak_share(gpu.FULL.config, "NVIDIA H200", one_tflop) == pytest.approx(1 / 989, rel=1e-2)
    assert goals.peak_share(gpu.FULL.config, "some other", one_tflop) is None


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_parts_that_take_long_measure(tmp_path: Path) -> None:
    run_short(tmp_path / "cpu.json", "profile")
    result = run_short(tmp_path / "cpu.json", "training", "sampling", "queue", "--add")

    assert [cell["what"] for cell in result["profile"]] == ["pass", "pass", "token"]
    assert all(cell["ms"] > 0 and cell["host_top"] for cell in result["profile"])
    assert list(result["duration_s"]) == ["profile", "training, sampling, queue"]

    assert [(cell["tenants"], cell["tokens"]) for cell in result["training"]["fusion"]] == [(1, 32), (4, 32)]
    assert set(result["training"]["fusion"][0]["fused_against"]) == {
        "one_by_one",
        "limit",
        "peft_switching",
        "peft_one_adapter",
    }
    assert result["training"]["step"][0]["step_against"]["peft_step"] > 0
    assert [cell["requests"] for cell in result["sampling"]] == [1, 8, 32]
    queue = result["queue"]
    assert queue["step_overhead"]["cells"][0]["ratio"] > 0
    assert [cell["tenants"] for cell in queue["device_wait"]["cells"]] == [1, 16]
    assert {cell["server"] for cell in queue["queue_overhead"]["cells"]} == {"twinkle", "nothing"}


def test_its_tests_are_found_without_the_other_tests_fixtures(bare: dict[str, str]) -> None:
    tests = REPOSITORY / "tests" / "gpu"
    command = [sys.executable, "-m", "pytest", "-c", tests / "pytest.ini", "--confcutdir", tests, tests, "-m", "gpu"]

    # With pytest's own plugins alone, as where nothing but pytest is installed.
    environment = {**bare, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--collect-only", "-q"], env=environment, capture_output=True, text=True, check=False, timeout=170
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_pass_that_does_not_fit_is_cut_until_it_does" in done.stdout
    assert "[cpu]" not in done.stdout


def test_a_part_that_fails_keeps_no_other_from_running(gpu: ModuleType, tmp_path: Path) -> None:
    def broken(_: object) -> object:
        raise RuntimeError("no")

    run = new_run(gpu, tmp_path, left_s=100.0)

    failed = gpu.run_parts(run, {"first": broken, "second": lambda _: {"fine": 1}})

    assert failed == ["first"]
    written = json.loads(run.output.read_text())
    assert written == {"first": {"failed": "RuntimeError: no"}, "second": {"fine": 1}}


def test_a_part_that_takes_too_long_is_broken_off_and_says_so(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    monkeypatch.setattr(gpu, "GRACE_S", 0.0)
    run = new_run(gpu, tmp_path, left_s=0.2)

    failed = gpu.run_parts(run, {"endless": lambda _: threading.Event().wait(), "late": lambda _: {"fine": 1}})

    assert failed == ["endless"]
    written = json.loads(run.output.read_text())
    assert written["endless"]["failed"].startswith("TimeoutError: the time was up")
    assert written["late"]["skipped"].endswith("s were left")


def test_of_a_part_whose_process_was_not_done_in_time_no_command_line_is_told(gpu: ModuleType, tmp_path: Path) -> None:
    def late(_: object) -> object:
        raise subprocess.TimeoutExpired(["python", "/home/me/tests"], 69.1)

    run = new_run(gpu, tmp_path, left_s=100.0)
    assert gpu.run_parts(run, {"tests": late}) == ["tests"]
    assert json.loads(run.output.read_text()) == {"tests": {"failed": "not done after 69 s"}}


def test_a_part_leaves_time_to_those_after_it(gpu: ModuleType, tmp_path: Path) -> None:
    run = new_run(gpu, tmp_path, left_s=1000.0)
    left = {}

    def noted(name: str) -> Any:
        return lambda own: left.update({name: own.left_s})

    gpu.run_parts(run, {name: noted(name) for name in gpu.PARTS})

    assert left["tests"] < 401 and left["training"] < 501 and left["queue"] > 900
    assert set(gpu.SHARES) < set(gpu.PARTS)


def test_a_part_that_no_time_is_left_for_is_named(gpu: ModuleType, tmp_path: Path) -> None:
    run = new_run(gpu, tmp_path, left_s=1.0)

    assert gpu.run_parts(run, {"late": lambda _: {"fine": 1}}) == []
    assert json.loads(run.output.read_text()) == {"late": {"skipped": "1 s were left"}}


def test_without_a_device_it_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])

    assert gpu.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
