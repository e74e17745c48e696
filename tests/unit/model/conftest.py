"""A tiny real model, rows, and a plain PEFT model to compare with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from harness.training import Row, make_rows
from twinkle.hub.tiny import make_tiny_model
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.model.fused.determinism import prepare_environment

prepare_environment()
torch.set_num_threads(1)

TEXTS = ["the quick brown fox jumps over the lazy dog, and the dog looks at the fox. " * 8]
Lora = Callable[..., peft.LoraConfig]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_tiny_model(folder, texts=TEXTS, vocab_size=288, hidden_size=64, layers=2, context=256)


@pytest.fixture(scope="session")
def fused_base(model_dir: Path) -> MultiLoraTransformersModel:
    """One fused model for a whole run; tests remove what they add (see ``fused``)."""
    return MultiLoraTransformersModel(model_id=str(model_dir), max_loras=3, max_r=16, max_length=200)


@pytest.fixture
def fused(fused_base: MultiLoraTransformersModel) -> MultiLoraTransformersModel:
    for name in list(fused_base.optimizer_group):
        fused_base.remove_adapter(name)
    return fused_base


@pytest.fixture
def plain(model_dir: Path) -> TransformersModel:
    return TransformersModel(model_id=str(model_dir))


@pytest.fixture
def lora() -> Lora:
    def config(rank: int = 4, **settings: Any) -> peft.LoraConfig:
        return peft.LoraConfig(**{"r": rank, "lora_alpha": 8, "target_modules": "all-linear", **settings})

    return config


@pytest.fixture
def rows() -> list[Row]:
    return make_rows(0)
