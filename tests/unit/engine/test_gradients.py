"""Gradients and logprobs against plain PEFT and autograd."""

import numpy as np
import peft
import pytest
import torch
import transformers

from harness.families import FAMILIES
from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.checkpoint_engine.peft_tensors import fill_buffer
from twinkle.model.fused.job_run import all_finite
from twinkle.model.fused.training import TrainJob
from twinkle.module.lora import LoraConfig


def randomize(adapter, seed):
    adapter.params.copy_(torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    adapter.publish()


def peft_twin(path, adapter, base_dir):
    """Plain PEFT around the same base with the same weights, to be trained."""
    for name, content in export_adapter(adapter, str(base_dir)).items():
        (path / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, path, is_trainable=True)


def peft_gradients(twin, adapter):
    """The gradients of the twin, laid out as the adapter's are."""
    stored = {
        name.replace(".default", ""): parameter.grad for name, parameter in twin.named_parameters() if ".lora_" in name
    }
    gradient = torch.zeros_like(adapter.grad)
    fill_buffer("gradient", stored, adapter.layout, gradient)
    return adapter.layout.views(gradient)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_gradients_equal_those_of_peft_and_autograd(family, base_dirs, load_model, make_datum, tmp_path):
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
        twin = peft_twin(tmp_path, job.adapter, base_dirs(family))
        loss = torch.zeros(())
        for datum, logprobs in zip(job.data, outcome.logprobs, strict=True):
            logits = twin(input_ids=torch.tensor(datum.tokens)[None]).logits[0]
            targets = torch.tensor(datum.inputs["target_tokens"])
            expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=2e-5)
            loss = loss - (expected * torch.tensor(datum.inputs["weights"])).sum()
        loss.backward()
        assert outcome.loss == pytest.approx(loss.item(), abs=1e-3)
        for path, theirs in peft_gradients(twin, job.adapter).items():
            for ours, expected in zip(job.adapter.grad_views[path], theirs, strict=True):
                torch.testing.assert_close(ours, expected, atol=2e-4 * expected.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("sick", [None, torch.nan, torch.inf, -torch.inf])
def test_a_buffer_is_finite_if_every_entry_is_also_where_their_sum_is_not(sick):
    buffer = torch.full((5000,), 3e38)
    assert torch.isinf(buffer.sum())
    if sick is not None:
        buffer[4321] = sick

    of_both = all_finite([buffer, buffer.clamp(-1, 1)])
    assert of_both == [sick is None, sick is None or abs(sick) == torch.inf]
