"""A whole model whose owners' products are made at once, as on an accelerator, against the same with the loop."""

import numpy as np
import pytest

from harness.lora_kernels import LoraKernels
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import TrainJob
from twinkle.module.lora import LoraConfig


def train(model, make_datum):
    """One fused call for three tenants; their logprobs and gradients."""
    rng = np.random.default_rng(3)
    configs = [LoraConfig(rank=8, seed=1), LoraConfig(rank=3, seed=2, train_attn=False), LoraConfig(rank=5, seed=3)]
    jobs = []
    for config in configs:
        adapter = model.create_adapter(config)
        for pair in adapter.views.values():
            pair.b.copy_(pair.b.new_ones(pair.b.shape) * 0.02)
        adapter.publish()
        data = tuple(make_datum(rng, length) for length in (7, 12))
        jobs.append(TrainJob(adapter, data, "cross_entropy"))
    outcomes = model.forward_backward(jobs)
    return [np.concatenate(outcome.logprobs) for outcome in outcomes], [job.adapter.grad for job in jobs]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3-moe", "qwen3_5", "deepseek-v2", "glm4-moe-lite"])
def test_a_model_computes_the_same_with_all_owners_at_once(
    family, in_place, base_dirs, load_model, make_datum, monkeypatch
):
    looped_logprobs, looped_gradients = train(load_model(family), make_datum)
    kernels = LoraKernels() if in_place else None
    monkeypatch.setattr("twinkle.module.lora.supports_grouped_products", lambda device, dtype: True)
    monkeypatch.setattr("twinkle.module.lora.kernels_for", lambda device_type, dtype: kernels)
    grouped_logprobs, grouped_gradients = train(FusedLoraModel.from_pretrained(str(base_dirs(family))), make_datum)
    assert kernels is None or kernels.add_outer.num_calls > 0

    for looped, grouped in zip(looped_logprobs, grouped_logprobs, strict=True):
        np.testing.assert_allclose(grouped, looped, atol=1e-5)
    for looped, grouped in zip(looped_gradients, grouped_gradients, strict=True):
        assert looped.abs().max() > 0
        assert (grouped - looped).abs().max() < 1e-5 * looped.abs().max().clamp(min=1)
