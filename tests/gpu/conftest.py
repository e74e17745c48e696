"""A tiny model on a device: on a GPU in bfloat16, and its twin on the CPU, which every test run makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.module.lora import LoraAdapter, LoraConfig

torch.set_num_threads(1)

VOCAB_SIZE = 307
CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


MANY_EXPERTS = 128
"""With those of eight tenants more groups than a grouped product takes."""
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "experts": lambda: transformers.Qwen3MoeConfig(
        **{**CONFIG, "num_hidden_layers": 2},
        num_experts=MANY_EXPERTS,
        num_experts_per_tok=8,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    "long": lambda: transformers.Qwen3Config(**{**CONFIG, "max_position_embeddings": 8192}),
    "hybrid": lambda: transformers.Qwen3_5TextConfig(
        **{**CONFIG, "num_hidden_layers": 2},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention", "full_attention"],
    ),
}


@dataclass(frozen=True)
class Bench:
    """The engine on one device, and the folder of its base model."""

    model: FusedLoraModel
    folder: Path

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.model.device

    def adapter(self, seed: int, *, rank: int = 8, size: float = 0.1) -> LoraAdapter:
        """An adapter that changes something."""
        adapter = self.model.create_adapter(LoraConfig(rank=rank, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        adapter.params.copy_(torch.randn(adapter.params.shape, generator=generator) * size)
        adapter.publish()
        return adapter

    def job(self, adapter: LoraAdapter, *lengths: int, seed: int = 0) -> TrainJob:
        """Cross entropy of random tokens."""
        rng = np.random.default_rng(seed)
        data = []
        for length in lengths:
            tokens = rng.integers(0, VOCAB_SIZE, length + 1)
            inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
            data.append(Datum(tokens=tokens[:-1], inputs=inputs))
        return TrainJob(adapter, tuple(data), "cross_entropy")

    def run(self, jobs: Sequence[TrainJob]) -> list[TrainOutcome]:
        """What jobs come to that go through the model together; none of them fails."""
        outcomes = []
        for outcome in self.model.forward_backward(jobs):
            assert isinstance(outcome, TrainOutcome), outcome
            outcomes.append(outcome)
        return outcomes

    @staticmethod
    def error(found: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative, by norm."""
        return float((found.float().cpu() - expected.float().cpu()).norm() / expected.float().norm())


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights."""
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("base")
    config = transformers.Qwen3Config(**CONFIG)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def load(base_folder: Path) -> Callable[[str], Bench]:
    """The engine on a device, loaded once."""
    loaded: dict[str, Bench] = {}

    def on(device: str) -> Bench:
        if device not in loaded:
            model = FusedLoraModel.from_pretrained(str(base_folder), device=device, dtype=torch.bfloat16)
            loaded[device] = Bench(model, base_folder)
        return loaded[device]

    return on


@pytest.fixture(scope="session")
def load_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Bench]:
    """Tiny models of other families on a device, loaded once."""
    loaded: dict[tuple[str, str], Bench] = {}

    def on(family: str, device: str) -> Bench:
        if (family, device) not in loaded:
            torch.manual_seed(7)
            folder = tmp_path_factory.mktemp(family)
            transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
            model = FusedLoraModel.from_pretrained(str(folder), device=device, dtype=torch.bfloat16)
            loaded[family, device] = Bench(model, folder)
        return loaded[family, device]

    return on


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device in turn."""
    return str(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest, load: Callable[[str], Bench]) -> Bench:
    """The engine in bfloat16 on each device in turn."""
    return load(request.param)
