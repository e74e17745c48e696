"""The engine in bfloat16, as it runs on a GPU: right, apart, repeatable and within memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.checkpoint_engine.peft_tensors import fill_buffer
from twinkle.checkpoint_engine.snapshot import restore, snapshot
from twinkle.model.fused.training import AdamParams, TrainJob
from twinkle.module.lora import LoraAdapter
from twinkle.sampler import SampleRequest, SteppedTorchSampler

LOGPROB_ERROR = 0.15
"""Of one token in bfloat16 against float32: three layers, each rounding to 2^-9, in logits of a few units."""
MEAN_LOGPROB_ERROR = 0.03
GRADIENT_ERROR = 0.05
"""Relative, by norm."""


def float32_reference(bench: Any, job: TrainJob, folder: Any) -> tuple[np.ndarray, torch.Tensor]:
    """Logprobs and the gradient by plain PEFT and autograd on the CPU, in float32."""
    for name, content in export_adapter(job.adapter, str(bench.folder)).items():
        (folder / name).write_bytes(content)
    base = transformers.AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.float32)
    twin = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    logprobs = []
    for datum in job.data:
        logits_TV = twin(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        targets_T = torch.from_numpy(datum.inputs["target_tokens"])
        logprobs.append(logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0])
    (-torch.cat(logprobs).sum()).backward()
    named = {name.replace(".default", ""): p.grad for name, p in twin.named_parameters() if ".lora_" in name}
    gradient = torch.zeros(job.adapter.grad.shape)
    fill_buffer("gradient", named, job.adapter.layout, gradient)
    return torch.cat(logprobs).detach().numpy(), gradient


# 12 and 96: their scale is no number that bfloat16 holds.
@pytest.mark.parametrize("rank", [8, 12, 96])
def test_logprobs_and_gradients_are_those_of_peft_in_float32(bench: Any, rank: int, tmp_path: Any) -> None:
    job = bench.job(bench.adapter(1, rank=rank, size=0.05), 33, 7, 64)

    (outcome,) = bench.run([job])

    logprobs, gradient = float32_reference(bench, job, tmp_path)
    error = np.abs(np.concatenate(outcome.logprobs) - logprobs)
    assert error.max() < LOGPROB_ERROR
    assert error.mean() < MEAN_LOGPROB_ERROR
    assert bench.error(job.adapter.grad, gradient) < GRADIENT_ERROR


def test_tenants_fused_get_what_they_get_alone(bench: Any) -> None:
    adapters = [bench.adapter(seed, rank=rank) for seed, rank in enumerate((4, 8, 16, 28))]
    jobs = [bench.job(adapter, 5, 40, seed=seed) for seed, adapter in enumerate(adapters)]
    fused = bench.run(jobs)
    gradients = [adapter.grad.clone() for adapter in adapters]
    for adapter in adapters:
        adapter.clear_gradients()

    for job, together, gradient in zip(jobs, fused, gradients, strict=True):
        (alone,) = bench.run([job])
        difference = np.abs(np.concatenate(alone.logprobs) - np.concatenate(together.logprobs))
        assert difference.max() < LOGPROB_ERROR
        assert bench.error(gradient, job.adapter.grad) < GRADIENT_ERROR


def test_what_a_neighbour_sends_changes_no_bit_of_a_tenants_logprobs(bench: Any) -> None:
    """Shapes decide which kernels run; the content of others must decide nothing."""
    mine, other = bench.adapter(1), bench.adapter(2)
    first = bench.run([bench.job(other, 80, seed=5), bench.job(mine, 30, 70, seed=1), bench.job(other, 9, seed=6)])
    second = bench.run([bench.job(other, 80, seed=7), bench.job(mine, 30, 70, seed=1), bench.job(other, 9, seed=8)])

    assert not np.array_equal(first[0].logprobs[0], second[0].logprobs[0])
    for one, two in zip(first[1].logprobs, second[1].logprobs, strict=True):
        np.testing.assert_array_equal(one, two)


def test_training_lowers_the_loss_of_every_tenant(bench: Any) -> None:
    jobs = [bench.job(bench.adapter(seed, size=0.02), 24, 24, seed=seed) for seed in range(3)]
    losses = []
    for _ in range(15):
        losses.append([outcome.loss for outcome in bench.run(jobs)])
        for job in jobs:
            bench.model.optim_step(job.adapter, AdamParams(learning_rate=5e-3))

    for before, after in zip(losses[0], losses[-1], strict=True):
        assert after < 0.8 * before


def test_an_adapter_goes_on_from_its_snapshot(bench: Any) -> None:
    adapter = bench.adapter(3)
    job = bench.job(adapter, 31)
    bench.run([job])
    bench.model.optim_step(adapter, AdamParams(learning_rate=1e-3))
    bench.run([job])
    kept = snapshot(adapter, bench.model.determinism)

    back = restore(bench.model.pool, kept, bench.model.determinism)

    assert torch.equal(back.params, adapter.params)
    assert torch.equal(back.grad, adapter.grad)
    (one,), (two,) = bench.run([job]), bench.run([TrainJob(back, job.data, job.loss)])
    np.testing.assert_array_equal(one.logprobs[0], two.logprobs[0])


def sample(bench: Any, adapters: Sequence[LoraAdapter | None], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    sampler = SteppedTorchSampler(bench.model, slots=8)
    for index, (adapter, prompt) in enumerate(zip(adapters, prompts, strict=True)):
        sampler.add(
            SampleRequest(
                key=str(index),
                adapter=adapter,
                prompt=tuple(prompt),
                seed=index,
                max_tokens=12,
                temperature=0.0,
                stop_token_ids=frozenset(),
            )
        )
    drawn = {}
    while sampler.has_work:
        for outcome in sampler.step():
            assert not isinstance(outcome, tuple), outcome
            drawn[outcome.key] = outcome.sequences[0]
    return drawn


def test_what_is_sampled_has_the_logprobs_that_training_sees(bench: Any) -> None:
    adapters = [bench.adapter(1), None, bench.adapter(2, rank=16), bench.adapter(3, rank=12)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).tolist() for length in (5, 40, 17, 64)]

    drawn = sample(bench, adapters, prompts)

    for index, (adapter, prompt) in enumerate(zip(adapters, prompts, strict=True)):
        if adapter is None:
            continue
        sequence = drawn[str(index)]
        tokens = np.array([*prompt, *sequence.tokens])
        job = bench.job(adapter, len(tokens) - 1)
        data = job.data[0]
        seen = TrainJob(
            adapter,
            (type(data)(tokens=tokens[:-1], inputs={**data.inputs, "target_tokens": tokens[1:]}),),
            "cross_entropy",
            backward=False,
        )
        (outcome,) = bench.run([seen])
        scored = outcome.logprobs[0][len(prompt) - 1 :]
        assert np.abs(scored - np.array(sequence.logprobs)).max() < LOGPROB_ERROR


@pytest.mark.gpu
def test_a_pass_that_does_not_fit_is_cut_until_it_does(load: Callable[[str], Any]) -> None:
    """Real memory runs out here; the CPU's twin is a model whose device says so."""
    bench = load("cuda")
    job = bench.job(bench.adapter(1), *[1024] * 48)
    held = torch.cuda.memory_allocated() + (96 << 20)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(held / torch.cuda.get_device_properties(0).total_memory)
    try:
        (outcome,) = bench.run([job])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert np.isfinite(outcome.loss)
    assert len(outcome.logprobs) == 48
