"""The caches that tests lay out are those that the hubs' own clients find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.hub_data import DATA_SETS
from harness.hub_world import HubWorld, make_hub_world

CLIENTS = """
import datasets
import huggingface_hub
import json
import modelscope
import transformers

found = {
    "model": modelscope.snapshot_download("Qwen/Qwen3.5-4B", local_files_only=True),
    "older": modelscope.snapshot_download("Qwen/Qwen2.5-7B-Instruct", local_files_only=True),
    "data": modelscope.snapshot_download("swift/self-cognition", repo_type="dataset", local_files_only=True),
    "hub": huggingface_hub.snapshot_download("Qwen/Qwen3-4B"),
    "rows": len(datasets.load_dataset("openai/gsm8k", "main", split="train")),
    "tokenizer": type(transformers.AutoTokenizer.from_pretrained("Qwen/Qwen3.5-4B")).__name__,
    "class": transformers.AutoConfig.from_pretrained("Qwen/Qwen3.5-4B").architectures,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> HubWorld:
    return make_hub_world(
        tmp_path_factory.mktemp("hubs"), models=("Qwen/Qwen3.5-4B", "Qwen/Qwen3-4B", "Qwen/Qwen2.5-7B-Instruct")
    )


def test_the_hubs_own_clients_find_what_was_placed_without_a_network(world: HubWorld) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CLIENTS],
        env={**os.environ, **world.environment},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert Path(found["model"]) == world.modelscope / "models" / "Qwen--Qwen3.5-4B" / "snapshots" / "master"
    assert Path(found["older"]) == world.modelscope / "models" / "Qwen" / "Qwen2___5-7B-Instruct"
    assert [file.name for file in Path(found["data"]).glob("*.jsonl")] == ["self_cognition.jsonl"]
    assert (Path(found["hub"]) / "model.safetensors.index.json").is_symlink()
    assert found["rows"] == 24
    assert found["class"] == ["Qwen3_5ForConditionalGeneration"]


def test_built_data_lies_in_a_folder_for_each_subset_with_its_splits(world: HubWorld) -> None:
    folder = world.modelscope / "datasets" / "modelscope___gsm8k"

    built = {path.relative_to(folder).parts[0].partition("-")[0]: path.name for path in folder.glob("*/0.0.0/master")}
    assert set(built) == {"main", "socratic"}
    arrow = sorted(path.name for path in folder.glob("main-*/0.0.0/master/*.arrow"))
    assert arrow == ["gsm8k-test.arrow", "gsm8k-train.arrow"]


def test_every_data_set_has_the_rows_that_were_written(world: HubWorld) -> None:
    for data_id, files in DATA_SETS.items():
        assert all((world.data(data_id) / file.path).stat().st_size for file in files), data_id
