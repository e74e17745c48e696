"""Gradients and logprobs against plain PEFT and autograd."""

import numpy as np
import peft
import pytest
import torch
import transformers

from twinkle.model.training import TrainJob
from twinkle.module.lora import LoraConfig


def randomize(adapter, seed):
    adapter.params.copy_(torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    adapter.publish()


def peft_twin(path, adapter):
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(
        r=adapter.config.rank,
        lora_alpha=adapter.config.alpha,
        target_modules=sorted({shape.path.split(".")[-1] for shape in adapter.layout.shapes}),
    )
    twin = peft.get_peft_model(base, config)
    for shape in adapter.layout.shapes:
        module = twin.base_model.model.get_submodule(shape.path)
        module.lora_A["default"].weight.data.copy_(adapter.views[shape.path].a)
        module.lora_B["default"].weight.data.copy_(adapter.views[shape.path].b)
    return twin


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied", "qwen2", "llama", "llama-tied"])
def test_fused_gradients_equal_those_of_peft_and_autograd(family, base_dirs, load_model, make_datum):
    model = load_model(family)
    rng = np.random.default_rng(1)
    configs = [
        LoraConfig(rank=8, seed=1),
        LoraConfig(rank=3, alpha=5.0, seed=2, train_mlp=False),
        LoraConfig(rank=5, seed=3, train_unembed=False),
    ]
    adapters = [model.create_adapter(config) for config in configs]
    for index, adapter in enumerate(adapters):
        randomize(adapter, index)
    jobs = [
        TrainJob(adapter, tuple(make_datum(rng, length) for length in (5, 17, 1, 30)), "cross_entropy")
        for adapter in adapters
    ]

    outcomes = model.forward_backward(jobs)

    for job, outcome in zip(jobs, outcomes, strict=True):
        twin = peft_twin(base_dirs(family), job.adapter)
        loss = torch.zeros(())
        for datum, logprobs in zip(job.data, outcome.logprobs, strict=True):
            logits = twin(input_ids=torch.tensor(datum.tokens)[None]).logits[0]
            targets = torch.tensor(datum.inputs["target_tokens"])
            expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=2e-5)
            loss = loss - (expected * torch.tensor(datum.inputs["weights"])).sum()
        loss.backward()
        assert outcome.loss == pytest.approx(loss.item(), abs=1e-3)
        for shape in job.adapter.layout.shapes:
            module = twin.base_model.model.get_submodule(shape.path)
            for ours, theirs in (
                (job.adapter.grad_views[shape.path].a, module.lora_A["default"].weight.grad),
                (job.adapter.grad_views[shape.path].b, module.lora_B["default"].weight.grad),
            ):
                torch.testing.assert_close(ours, theirs, atol=2e-4 * theirs.abs().max().item(), rtol=1e-3)
