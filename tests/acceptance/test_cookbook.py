"""Recipes of the Tinker cookbook, unmodified, against a whole service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cookbook import SL_LOOP_ARGUMENTS, cookbook_python, make_offline_data, read_metrics, run_recipe
from harness.served import Served

# A name that the cookbook has a renderer for; the model behind it is the tiny one.
MODEL_NAME = "Qwen/Qwen3-8B"

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served_as_qwen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    cookbook_python()
    home = tmp_path_factory.mktemp("cookbook") / "home"
    with Served(home, model=str(tiny_model), model_name=MODEL_NAME) as served:
        yield served


def test_sl_loop_trains_saves_and_resumes(served_as_qwen: Served, tiny_model: Path, tmp_path: Path) -> None:
    cwd = make_offline_data(tmp_path, model_name=MODEL_NAME, tokenizer_folder=tiny_model)
    key = served_as_qwen.create_key("cookbook")
    arguments = [*SL_LOOP_ARGUMENTS, f"model_name={MODEL_NAME}", f"log_path={tmp_path / 'log'}"]

    first = run_recipe("sl_loop", arguments, base_url=served_as_qwen.url, api_key=key, cwd=cwd)
    again = run_recipe("sl_loop", arguments, base_url=served_as_qwen.url, api_key=key, cwd=cwd)

    assert first.returncode == 0, first.stdout
    assert again.returncode == 0, again.stdout
    losses = [step["train_mean_nll"] for step in read_metrics(tmp_path / "log") if "train_mean_nll" in step]
    assert losses[0] > losses[2]
    saved = served_as_qwen.query("SELECT kind, name FROM checkpoint WHERE listed ORDER BY kind, name")
    assert ("training", "final") in saved
    assert ("sampler", "final") in saved
