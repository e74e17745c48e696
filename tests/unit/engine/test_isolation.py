"""No sequence of a pass feels another: a model with which it would is refused before anything is served."""

import os
import sys

import pytest
import torch
import transformers

from harness.families import FAMILIES, SIZES
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.model.fused import layers
from twinkle.model.fused import model as fused_model
from twinkle.model.fused.determinism import UNPADDED
from twinkle.model.fused.independence import Independence
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.probe import Probe
from twinkle.module.segmented import Route
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.ranks.engine import RankedEngine

HYBRID = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
HYBRIDS = {
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **HYBRID, rope_parameters={**PARTIAL_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    ),
    "nemotron-h": FAMILIES["nemotron-h"],
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **HYBRID,
        rope_parameters=PARTIAL_ROPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
    ),
}
CHECKS = {
    "sequences against each alone": (Probe, "compare"),
    "jobs against each alone": (Independence, "keeps_bits"),
    "sequences beside others": (Probe, "isolate"),
}


class BackwardOnly(torch.autograd.Function):
    """Leaves values as they are, and lets gradients of all tokens into each other."""

    @staticmethod
    def forward(ctx, x_1TH):
        return x_1TH.clone()

    @staticmethod
    def backward(ctx, dx_1TH):
        return dx_1TH + 0.1 * dx_1TH.sum(dim=1, keepdim=True)


def before(x_1TH):
    """The values of the token before each."""
    return torch.nn.functional.pad(x_1TH, (0, 0, 1, 0))[:, :-1]


LEAKS = {
    "a convolution": lambda x: x + 0.1 * before(x),
    "a convolution too weak to be seen in values": lambda x: x + 1e-9 * before(x),
    "a mask by which another is multiplied with zero": lambda x: x + 0 * before(x),
    "the mean of a pass": lambda x: x + 0.1 * x.mean(dim=1, keepdim=True),
    "a scale by the largest value of a pass": lambda x: x * (1 + x.abs().amax()),
    "gradients alone": BackwardOnly.apply,
}


def make(config, dtype=torch.float32):
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def long_rope(tokens):
    """A model whose positions are scaled for a whole pass, once a sequence of it is longer than ``tokens``."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": tokens,
    }
    return transformers.Phi3Config(
        **SIZES, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=tokens
    )


@pytest.fixture
def unpacked_layers(monkeypatch):
    """What lets their convolution and their state start anew with every sequence, taken away."""
    for name in ("pack_delta_nets", "pack_mamba_layers"):
        monkeypatch.setattr(layers, name, lambda model, functions: False)


def leave_only(monkeypatch, check):
    for owner, name in CHECKS.values():
        if (owner, name) != check:
            monkeypatch.setattr(owner, name, lambda *args, **settings: True)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_that_carry_a_state_over_are_refused_by_each_check_alone(family, check, unpacked_layers, monkeypatch):
    leave_only(monkeypatch, CHECKS[check])
    with pytest.raises(ConfigError, match="not supported"):
        FusedLoraModel(make(HYBRIDS[family]()), name="hybrid")


@pytest.mark.parametrize("promise", ["bits", "no bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_layer_that_lets_one_sequence_into_another_is_refused(leak, dtype, promise, monkeypatch):
    model = make(transformers.Qwen3Config(**SIZES, head_dim=16), dtype)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: LEAKS[leak](output))
    if promise == "no bits":
        monkeypatch.setattr(fused_model, "measure_determinism", lambda device, dtype: ("none", UNPADDED))

    with pytest.raises(ConfigError, match="not supported"):
        FusedLoraModel(model, name="leaky")


def test_adapters_that_reach_one_row_too_far_are_refused(base_dirs, monkeypatch):
    pairs = Route.pairs

    def one_row_too_far(self, path):
        last = max((segment.end for segment in self.segments), default=0)
        for pair in pairs(self, path):
            # All but the first begin a row later: products take no row twice.
            yield pair._replace(start=pair.start + (pair.start > 0), end=min(pair.end + 1, last))

    monkeypatch.setattr(Route, "pairs", one_row_too_far)
    with pytest.raises(ConfigError, match="does not keep jobs apart"):
        FusedLoraModel.from_pretrained(str(base_dirs("qwen3")))


def test_positions_that_a_longer_sequence_beside_scales_are_refused(monkeypatch):
    monkeypatch.setattr("twinkle.hub.support.MOVING_ROPES", frozenset())
    with pytest.raises(ConfigError, match="does not keep sequences apart: with other content"):
        FusedLoraModel(make(long_rope(tokens=256)), name="scaled")


@pytest.mark.parametrize(("ranks", "shard"), [(1, "replicate"), (2, "fsdp")])
def test_a_worker_and_its_ranks_refuse_to_serve_such_a_model(ranks, shard, tmp_path, monkeypatch):
    monkeypatch.setattr("twinkle.hub.support.MOVING_ROPES", frozenset())
    (tmp_path / "sitecustomize.py").write_text("from twinkle.hub import support\nsupport.MOVING_ROPES = frozenset()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    make(long_rope(tokens=256)).save_pretrained(tmp_path / "model")
    settings = Settings(model=str(tmp_path / "model"), ranks=ranks, shard=shard, threads=1)
    start = TransformersEngine.from_settings if ranks == 1 else RankedEngine.start

    with pytest.raises(ConfigError, match="does not keep sequences apart"):
        start(settings)
