"""Tiny real models for the engine's tests, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from harness.families import FAMILIES, VOCAB_SIZE, stir
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum

prepare_environment()
torch.set_num_threads(1)

LoadModel = Callable[..., FusedLoraModel]
MakeDatum = Callable[..., Datum]


@pytest.fixture(scope="session")
def base_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a saved tiny model of a family."""
    made: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in made:
            torch.manual_seed(7)
            path = tmp_path_factory.mktemp(family)
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
            stir(model)
            model.save_pretrained(path)
            made[family] = path
        return made[family]

    return directory


@pytest.fixture(scope="session")
def load_model(base_dirs: Callable[[str], Path]) -> LoadModel:
    """Our engine around a tiny model; loaded once for each set of options."""
    loaded: dict[tuple[str, int | None], FusedLoraModel] = {}

    def load(family: str = "qwen3", tokens_per_pass: int | None = None) -> FusedLoraModel:
        key = (family, tokens_per_pass)
        if key not in loaded:
            loaded[key] = FusedLoraModel.from_pretrained(str(base_dirs(family)), tokens_per_pass=tokens_per_pass)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def make_datum() -> MakeDatum:
    """A datum of random tokens with every input any loss may ask for."""

    def make(rng: np.random.Generator, length: int, *, columns: int | None = None) -> Datum:
        shape = (length,) if columns is None else (length, columns)
        return Datum(
            tokens=rng.integers(0, VOCAB_SIZE, length),
            inputs={
                "target_tokens": rng.integers(0, VOCAB_SIZE, shape),
                "weights": rng.normal(size=shape).astype(np.float32),
                "logprobs": rng.normal(-5.5, 0.5, size=shape).astype(np.float32),
                "advantages": rng.normal(size=shape).astype(np.float32),
                "sequence_ratio_mask": (rng.random(shape) < 0.7).astype(np.float32),
            },
        )

    return make
