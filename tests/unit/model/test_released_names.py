"""Adapters trained on the language model of a class for pictures have that class's names in files."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch

from harness.hub_models import save_hub_model
from harness.opened_checkpoint import assert_same_in_peft
from twinkle.model import MultiLoraTransformersModel, TransformersModel

ROWS = [{"input_ids": [7, 8, 9, 30, 40, 50], "labels": [8, 9, 30, 40, 50, -100]}]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3_5ForConditionalGeneration."""
    return save_hub_model(tmp_path_factory.mktemp("released") / "model", "qwen3_5")


def train(model: TransformersModel | MultiLoraTransformersModel, folder: Path) -> str:
    model.add_adapter_to_model("a", peft.LoraConfig(r=4, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2)
    for _ in range(3):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()
    return str(model.save("adapter", output_dir=folder))


def logps_of(model: TransformersModel | MultiLoraTransformersModel) -> torch.Tensor:
    return torch.as_tensor(model.forward_only(inputs=ROWS)["logps"])[0, :-1]


def test_the_released_class_opens_what_the_language_model_was_trained_to(released: Path, tmp_path: Path) -> None:
    model = TransformersModel(model_id=str(released), mixed_precision="no")
    checkpoint = Path(train(model, tmp_path))

    names = safetensors.torch.load_file(checkpoint / "adapter_model.safetensors").keys()
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    assert names == model.get_state_dict().keys()
    assert_same_in_peft(released, checkpoint)


def test_both_models_read_each_others_adapters_of_a_released_class(released: Path, tmp_path: Path) -> None:
    plain = TransformersModel(model_id=str(released), mixed_precision="no")
    from_plain = train(plain, tmp_path / "plain")
    fused = MultiLoraTransformersModel(model_id=str(released), mixed_precision="no")
    from_fused = train(fused, tmp_path / "fused")

    assert not torch.allclose(logps_of(plain), logps_of(fused), atol=1e-4)
    wanted_of_plain, wanted_of_fused = logps_of(fused), logps_of(plain)
    plain.load(from_fused)
    fused.load(from_plain)
    assert torch.allclose(logps_of(plain), wanted_of_plain, atol=1e-4)
    assert torch.allclose(logps_of(fused), wanted_of_fused, atol=1e-4)


@pytest.mark.parametrize("names", ["released", "alone"])
def test_an_adapter_is_added_from_its_folder_under_either_name(released: Path, tmp_path: Path, names: str) -> None:
    first = TransformersModel(model_id=str(released), mixed_precision="no")
    checkpoint = Path(train(first, tmp_path))
    if names == "alone":
        # As PEFT itself writes it of the language model's class.
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            name_anew(checkpoint / file)
    second = TransformersModel(model_id=str(released), mixed_precision="no")
    second.add_adapter_to_model("again", str(checkpoint))

    assert torch.equal(logps_of(second), logps_of(first))


def name_anew(file: Path) -> None:
    if file.suffix == ".json":
        file.write_text(file.read_text().replace("model.language_model.", "model."))
        return
    tensors = safetensors.torch.load_file(file)
    renamed = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})
