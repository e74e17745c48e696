"""The engine on a tiny mixture of experts, from creation to a restored snapshot."""

import numpy as np
import pytest
import torch

from twinkle.core.adapter import AdapterConfig
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sample_result import decode_sample_response
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine

TEXT = "the quick brown fox jumps over the lazy dog. "
NUM_STEPS = 30


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny-moe",
        texts=[TEXT * 4],
        family="qwen3_moe",
        vocab_size=300,
        hidden_size=64,
        layers=2,
        context=256,
    )
    return TransformersEngine.from_settings(Settings(model=str(folder), threads=1))


def a_pass(state, seed, *, length=24):
    tokens = np.random.default_rng(seed).integers(8, 200, length + 1)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, dtype=np.float32)}
    body = ForwardBackwardBody("m", 1, False, "cross_entropy", {}, (WireDatum(tokens[:-1], inputs),))
    return Pass(state=state, body=body)


def sample(engine, state):
    request = SampleRequest.model_validate(
        {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [9, 10, 11]}]},
            "sampling_params": {"max_tokens": 12, "seed": 3, "temperature": 1.0, "stop": []},
            "base_model": "m",
        }
    )
    engine.add_sample("s", state, request, cache_group="tenant:t")
    while engine.num_samples_under_way:
        for output in engine.step_samples():
            assert output.error is None
            return decode_sample_response(output.result).sequences[0]
    raise AssertionError("the sample never ended")


def test_an_adapter_on_experts_lives_through_everything_the_worker_asks_for(engine):
    assert engine.capabilities.architecture == "Qwen3MoeForCausalLM"
    assert engine.capabilities.determinism != "none"
    config = AdapterConfig(base_model="m", rank=4, seed=1)
    adapter, other = engine.create(config), engine.create(config.model_copy(update={"seed": 2}))
    experts = [shape for shape in adapter.layout.shapes if shape.num_experts == 8]
    assert len(experts) == 4

    losses = []
    for _ in range(NUM_STEPS):
        result, _ = engine.run_passes([a_pass(adapter, 0), a_pass(other, 1)])
        losses.append(result.metrics["loss:sum"])
        for state in (adapter, other):
            assert engine.optim_step(state, AdamParams(learning_rate=1e-2))["grad_norm"] > 0
    assert losses[-1] < 0.3 * losses[0]
    for shape in experts:
        assert adapter.views[shape.path].b.flatten(1).any(dim=1).sum() >= 2

    restored = engine.restore(engine.snapshot(adapter))
    exported = engine.export(adapter, with_optimizer=True)
    loaded = engine.load(config, exported, with_optimizer=True, trainable=True)
    for again in (restored, loaded):
        engine.run_passes([a_pass(again, 5)])
        engine.optim_step(again, AdamParams(learning_rate=1e-2))
    engine.run_passes([a_pass(other, 1), a_pass(adapter, 5)])
    engine.optim_step(adapter, AdamParams(learning_rate=1e-2))
    assert torch.equal(restored.params, adapter.params)
    assert torch.equal(loaded.params, adapter.params)

    trained, base = sample(engine, adapter), sample(engine, None)
    assert trained.tokens.tolist() == sample(engine, restored).tokens.tolist()
    assert trained.tokens.tolist() != base.tokens.tolist()


def test_the_size_of_an_adapter_is_told_to_the_last_parameter(engine):
    sizes = engine.capabilities.adapter_sizes
    for trained in ({}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}):
        config = AdapterConfig(base_model="m", rank=3, seed=1, **trained)
        asked = {name: getattr(config, name) for name in ("train_attn", "train_mlp", "train_unembed")}
        assert sizes.num_parameters(3, **asked) == engine.create(config).params.numel()
