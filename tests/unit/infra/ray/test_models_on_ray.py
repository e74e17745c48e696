"""A model and a data loader on the workers of a group: the numbers of two ranks under torchrun."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.script_run import run_script
from harness.two_ranks import LAYOUTS, train
from twinkle.data_format.answers import ModelOutput
from twinkle.dataloader import DataLoader
from twinkle.hub.tiny import make_tiny_model
from twinkle.infra import DeviceMesh
from twinkle.infra.remote import marks_of
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.remote_outputs import joined_outputs

TEXTS = ["the quick brown fox jumps over the lazy dog. " * 4]


@pytest.mark.usefixtures("on_ray")
def test_two_workers_that_share_weights_sequences_or_experts_give_the_numbers_of_two_ranks_under_torchrun(
    tmp_path: Path,
) -> None:
    models_dir = tmp_path / "models"
    for what in LAYOUTS:
        family = "qwen3_moe" if what == "experts" else "qwen3"
        make_tiny_model(
            models_dir / what, texts=TEXTS, family=family, vocab_size=288, hidden_size=64, layers=1, context=64
        )

    on_ray = train(models_dir, tmp_path / "ray")
    text = "from harness.two_ranks import main\nmain()\n"
    ranked = run_script(text, tmp_path / "torchrun", {}, arguments=(str(models_dir),), ranks=2)

    assert all(len(came_to["steps"]) == 3 and came_to["weights"] for came_to in on_ray.values())
    assert on_ray == json.loads((ranked.folder / "came_to.json").read_text())
    for what in LAYOUTS:
        assert (tmp_path / "ray" / what / "last" / "adapter_model.safetensors").exists()


def make_rows() -> list[dict[str, Any]]:
    """Called where the loader is."""
    return [{"number": number, "process": os.getpid()} for number in range(7)]


@pytest.mark.usefixtures("on_ray")
def test_a_loader_made_of_a_function_reads_in_the_group_and_hands_out_whole_batches() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2)
    loader = DataLoader(make_rows, batch_size=4, min_batch_size=2, device_mesh=mesh, remote_group="model")

    batches = []
    states = []
    for batch in loader:
        batches.append(batch)
        states.append(loader.get_state()["consumed_train_samples"])

    assert len(loader) == 2 and states == [4, 7]
    assert [[row["number"] for row in batch] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    assert batches[0][0]["process"] != os.getpid()
    loader.resume_from_checkpoint(4)
    assert [row["number"] for row in next(iter(loader))] == [4, 5, 6]


@pytest.mark.usefixtures("on_ray")
def test_a_loader_of_the_script_itself_hands_out_whole_batches_too() -> None:
    loader = DataLoader(make_rows, batch_size=4, device_mesh=DeviceMesh.from_sizes(dp_size=2))

    assert [len(batch) for batch in loader] == [4, 3]


@pytest.mark.parametrize("kind", [TransformersModel, MultiLoraTransformersModel])
def test_every_call_of_a_script_on_a_model_has_a_mark(kind: type) -> None:
    calls = {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    unmarked = calls - set(marks_of(kind))

    # Of the engine itself, or of what must be on the same process.
    assert unmarked <= {
        "begin_sync",
        "engine_of_sync",
        "init_checkpoint_process_group",
        "core",
        "embed",
        "end_sync",
        "fused_forward_backward",
        "group",
        "open",
        "register_mm_forward_hook",
        "send_weights",
        "unregister_mm_forward_hook",
    }


def test_outputs_of_data_ranks_are_those_of_one_pass() -> None:
    first = ModelOutput(logps=torch.ones(1, 2), logits=None, loss=3.0, num_tokens=2)
    second = ModelOutput(logps=torch.full((2, 3), 2.0), logits=None, loss=1.0, num_tokens=6)

    joined = joined_outputs([first, second])

    assert joined.logps.tolist() == [[1, 1, 0], [2, 2, 2], [2, 2, 2]]
    assert (joined.loss, joined.num_tokens, joined.logits) == (4.0, 8, None)
    assert joined_outputs([{"loss": 1.0, "num_tokens": 1}, {"loss": 2.0, "num_tokens": 1}]).loss == 1.5
