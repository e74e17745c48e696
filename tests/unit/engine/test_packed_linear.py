"""A frozen base in eight bits: what it saves, what it changes, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.infra.rank_group import ALONE
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import Datum, TrainJob, TrainOutcome
from twinkle.model.loading import decoder_of
from twinkle.module import packed_linear
from twinkle.module.lora import LoraConfig, LoraLinear, Segment
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.packed_linear import EightBits
from twinkle.workers.engines.loading import load_served

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: pip install 'twinkle-queue[quantised]'"
)
Dirs = Callable[[str], Path]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"sampler": "vllm"}, "TWINKLE_QUANTISATION: int8 goes with TWINKLE_SAMPLER=torch, not vllm"),
        ({"shard": "fsdp", "ranks": 2}, "TWINKLE_QUANTISATION: int8 goes with TWINKLE_SHARD=replicate, not fsdp"),
        ({"serves": "whole-model"}, "TWINKLE_QUANTISATION: whole-model trains the base model's own weights"),
        ({}, "TWINKLE_QUANTISATION: int8 weights are torchao's: pip install 'twinkle-queue.quantised.'"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    others: dict[str, Any], message: str, base_dirs: Dirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "find_spec", lambda name: None)
    settings = Settings(model=str(base_dirs("qwen3")), threads=1, quantisation="int8", **others)
    with pytest.raises(ConfigError, match=message):
        load_served(settings, ALONE)


def packed_model(folder: Path, packing: EightBits) -> FusedLoraModel:
    return FusedLoraModel.from_pretrained(
        str(folder), reduce=lambda model: packing.pack(decoder_of(model), name="tiny")
    )


def linears(model: FusedLoraModel) -> dict[str, LoraLinear]:
    return {path: module for path, module in model.module.named_modules() if isinstance(module, LoraLinear)}


def logits_of(model: FusedLoraModel, tokens_T: torch.Tensor) -> torch.Tensor:
    owners = [Segment(None, 0, len(tokens_T))]
    hidden_TH = model.run_packed(tokens_T, torch.arange(len(tokens_T)), owners, CausalSpans([(0, len(tokens_T))]))
    return model.logits(hidden_TH, owners)


@needs_torchao
def test_logits_and_gradients_are_those_of_the_weights_that_it_stands_for(
    base_dirs: Dirs, make_datum: Callable[..., Datum]
) -> None:
    folder = base_dirs("qwen3")
    packing = EightBits()
    packed, plain = packed_model(folder, packing), FusedLoraModel.from_pretrained(str(folder))
    assert packed.determinism == plain.determinism
    assert 0 < packing.largest_error < 0.01
    tokens_T = torch.randint(0, plain.info.vocab_size, (60,), generator=torch.Generator().manual_seed(0))
    exact, rounded = logits_of(plain, tokens_T), logits_of(packed, tokens_T)
    assert 0 < (exact - rounded).norm() / exact.norm() < 0.05

    own, theirs = linears(plain), linears(packed)
    assert len(own) == packing.num_packed
    saved = sum(3 * module.weight.numel() for module in own.values())
    assert plain.base_bytes - packed.base_bytes > 0.8 * saved
    for path, module in own.items():
        module.weight.data.copy_(theirs[path].weight.dequantize())
    assert torch.equal(logits_of(plain, tokens_T), rounded)
    results = []
    for model in (plain, packed):
        adapters = [model.create_adapter(LoraConfig(rank=4, seed=seed)) for seed in range(2)]
        rng = np.random.default_rng(1)
        jobs = [TrainJob(adapter, (make_datum(rng, 9), make_datum(rng, 20)), "cross_entropy") for adapter in adapters]
        outcomes = model.forward_backward(jobs)
        gradients = [adapter.grad.clone() for adapter in adapters]
        adapters[0].clear_gradients()
        (alone,) = model.forward_backward(jobs[:1])
        assert isinstance(alone, TrainOutcome)
        assert torch.equal(adapters[0].grad, gradients[0]), "the same bits alone and in company"
        results.append((outcomes, gradients))
    for outcome, other in zip(*(outcomes for outcomes, _ in results), strict=True):
        assert isinstance(outcome, TrainOutcome)
        assert isinstance(other, TrainOutcome)
        np.testing.assert_array_equal(np.concatenate(outcome.logprobs), np.concatenate(other.logprobs))
    assert all(torch.equal(one, other) for one, other in zip(*(gradients for _, gradients in results), strict=True))


@needs_torchao
def test_no_unpacked_weight_is_kept_for_the_way_back(base_dirs: Dirs) -> None:
    packed = packed_model(base_dirs("qwen3"), EightBits())
    plain = FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))
    assert packed.activation_sizes == plain.activation_sizes


@needs_torchao
def test_a_mesh_says_that_it_is_rounded_and_by_how_much_and_experts_are_refused(base_dirs: Dirs) -> None:
    served = load_served(Settings(model=str(base_dirs("qwen3")), threads=1, quantisation="int8"), ALONE)
    said = served.capabilities
    assert said.quantisation == "int8"
    assert 0 < said.quantisation_error < 0.01
    assert said.determinism != "none"
    other = said.model_copy(update={"quantisation": "none"})
    assert other.why_not_on(said) == "its quantisation is int8, not none"
    with pytest.raises(ConfigError, match=r"TWINKLE_QUANTISATION: .* has fused experts"):
        load_served(Settings(model=str(base_dirs("qwen3-moe")), threads=1, quantisation="int8"), ALONE)
