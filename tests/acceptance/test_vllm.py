"""The sampler on vLLM, in an environment of its own: vLLM and this project's tests want different versions."""

from __future__ import annotations

import re

import pytest

from harness.vllm import run_pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def test_vllm_keeps_the_promises_of_samplers_and_says_what_our_own_and_the_trainer_say() -> None:
    done = run_pytest(["tests/unit/sampler/test_vllm_sampler.py", "tests/unit/sampler/test_sample_call.py"])

    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 50, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_a_mesh_samples_through_vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = run_pytest(["tests/unit/sampler/test_vllm_engine.py"])

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


def test_vllm_on_a_group_of_devices_is_kept_in_step_with_a_training_on_another() -> None:
    done = run_pytest(["tests/unit/sampler/test_vllm_groups.py"])

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
