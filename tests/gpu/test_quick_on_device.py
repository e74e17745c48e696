"""What makes the engine quick on a GPU, each beside its twin on the CPU: right, and without waiting for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.checkpoint_engine.snapshot import StateCopy, copy_state, snapshot
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.scaled_attention import AttentionForm
from twinkle.module.varlen import PackedSequences, kernel_for
from twinkle.sampler import SampleRequest, SteppedTorchSampler

NUM_TENANTS = 8
LOGPROB_ERROR = 0.15
GRADIENT_ERROR = 0.05


@pytest.mark.parametrize("family", ["experts", "hybrid"])
def test_eight_tenants_fused_get_what_they_get_alone(
    family: str, device: str, load_family: Callable[[str, str], Any]
) -> None:
    bench = load_family(family, device)
    adapters = [bench.adapter(seed, rank=8, size=0.05) for seed in range(NUM_TENANTS)]
    jobs = [bench.job(adapter, 20, seed=seed) for seed, adapter in enumerate(adapters)]
    fused = bench.run(jobs)
    gradients = [adapter.grad.clone() for adapter in adapters]
    for adapter in adapters:
        adapter.clear_gradients()
    for job, together, gradient in zip(jobs, fused, gradients, strict=True):
        (alone,) = bench.run([job])
        assert np.abs(alone.logprobs[0] - together.logprobs[0]).mean() < LOGPROB_ERROR
        assert bench.error(job.adapter.grad, gradient) < GRADIENT_ERROR


def test_layers_computed_twice_give_what_they_gave_kept(
    bench: Any, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bench.job(bench.adapter(1), 70, 33)
    kept = bench.run([job])
    gradient = job.adapter.grad.clone()
    job.adapter.clear_gradients()
    monkeypatch.setattr(bench.model._recomputation._budget, "wants_recomputation", lambda num_tokens: True)
    twice = bench.run([job])
    for one, two in zip(kept[0].logprobs, twice[0].logprobs, strict=True):
        np.testing.assert_array_equal(one, two)
    assert bench.error(job.adapter.grad, gradient) < GRADIENT_ERROR


DECODED = {"cpu": 96, "cuda": 4096}


def test_a_long_answer_has_the_logprobs_that_training_sees(device: str, load_family: Callable[[str, str], Any]) -> None:
    bench = load_family("long", device)
    adapter = bench.adapter(1, size=0.05)
    prompt = tuple(np.random.default_rng(0).integers(3, 300, 70).tolist())
    sampler = SteppedTorchSampler(bench.model, slots=2)
    sampler.add(
        SampleRequest(
            key="long", adapter=adapter, prompt=prompt, seed=1, max_tokens=DECODED[device], stop_token_ids=frozenset()
        )
    )
    outcomes: list[Any] = []
    while sampler.has_work:
        outcomes += sampler.step()
    (sequence,) = outcomes[0].sequences
    assert len(sequence.tokens) == DECODED[device]
    tokens = np.array([*prompt, *sequence.tokens])
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    job = TrainJob(adapter, (Datum(tokens=tokens[:-1], inputs=inputs),), "cross_entropy", backward=False)
    (scored,) = bench.run([job])
    difference = np.abs(scored.logprobs[0][len(prompt) - 1 :] - np.array(sequence.logprobs))
    assert difference.mean() < LOGPROB_ERROR / 5


def test_a_replay_gives_what_is_promised(bench: Any) -> None:
    """The same bits where the mode says so; else, as on a GPU, the same within rounding."""
    adapters = [bench.adapter(1), bench.adapter(2)]
    jobs = [bench.job(adapter, 30, 12, seed=seed) for seed, adapter in enumerate(adapters)]
    first = bench.run(jobs)[0]
    gradient = adapters[0].grad.clone()
    for adapter in adapters:
        adapter.clear_gradients()
    (again,) = bench.run(jobs[:1])
    if bench.model.determinism == "none":
        assert bench.error(adapters[0].grad, gradient) < GRADIENT_ERROR
    else:
        assert torch.equal(adapters[0].grad, gradient)
        for one, two in zip(first.logprobs, again.logprobs, strict=True):
            np.testing.assert_array_equal(one, two)


def waits(act: Callable[[], object]) -> list[str]:
    """Where the host waited for the GPU, each time."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in seen if "called a synchronizing" in str(each.message)]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["plain", "experts"])
def test_a_pass_waits_as_often_for_many_datums_as_for_one(
    family: str, load: Callable[[str], Any], load_family: Callable[[str, str], Any]
) -> None:
    """The CPU's twin counts reads: tests/unit/engine/test_host_reads.py."""
    bench = load("cuda") if family == "plain" else load_family(family, "cuda")
    adapter = bench.adapter(1)
    jobs = [bench.job(adapter, 30), bench.job(adapter, *[30] * 8)]
    for job in jobs:
        bench.run([job])  # what is looked up once
        adapter.clear_gradients()
    found = []
    for job in jobs:
        found.append(waits(lambda job=job: bench.run([job])))
        adapter.clear_gradients()
    assert found[0] == found[1]
    assert len(found[0]) <= 3  # the values of two dtypes, and whether the gradient is finite


@pytest.mark.gpu
def test_a_step_of_tokens_waits_for_no_pass_of_its_own(load: Callable[[str], Any]) -> None:
    """Its twin is ``tests/unit/sampler/test_reads_behind.py``."""
    bench = load("cuda")
    sampler = SteppedTorchSampler(bench.model, slots=8)
    for number in range(4):
        sampler.add(
            SampleRequest(
                key=str(number),
                adapter=bench.adapter(number),
                prompt=(5, 6, 7),
                seed=number,
                max_tokens=32,
                stop_token_ids=frozenset(),
            )
        )
    for _ in range(4):
        sampler.step()  # what is looked up once
    assert waits(sampler.step) == []


@pytest.mark.gpu
def test_an_optimizer_step_waits_for_its_norm_alone(load: Callable[[str], Any]) -> None:
    bench = load("cuda")
    adapter = bench.adapter(1)
    bench.run([bench.job(adapter, 30)])
    assert len(waits(lambda: bench.model.optim_step(adapter, AdamParams()))) <= 2


@pytest.mark.gpu
def test_a_recovery_point_is_copied_without_a_wait_and_is_what_was_there(load: Callable[[str], Any]) -> None:
    """A step right behind it waits on the device alone; its twin is ``tests/unit/engine/test_state_copies.py``."""
    bench = load("cuda")
    adapter = bench.adapter(1)
    written = snapshot(adapter, bench.model.determinism)
    copies: list[StateCopy] = []

    def copy_and_change() -> None:
        copies.append(copy_state(adapter, bench.model.determinism))
        for buffer in (adapter.params, adapter.exp_avg, adapter.exp_avg_sq):
            buffer.fill_(-1.0)

    assert waits(copy_and_change) == []
    assert copies[0].data() == written


def rows(lengths: Sequence[int], device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(lengths), heads, 64, generator=generator)
        .to(device, torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_(True)
        for heads in (8, 2, 2)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
def test_one_attention_call_gives_what_a_call_for_each_sequence_gives(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [70, 1, 130, 17]
    spans = list(pairwise(np.cumsum([0, *lengths]).tolist()))
    form = AttentionForm(0.125, window=window)
    together, apart = rows(lengths, "cuda", 0), rows(lengths, "cuda", 0)
    assert kernel_for(together[0], together[1], form) is not None
    found = CausalSpans(spans)(0, *together, form=form)
    monkeypatch.setattr("twinkle.module.packed_attention.kernel_for", lambda query, key, form: None)
    expected = CausalSpans(spans)(0, *apart, form=form)
    assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    upstream = torch.randn_like(found)
    for one, two in zip(
        torch.autograd.grad(found, together, upstream), torch.autograd.grad(expected, apart, upstream), strict=True
    ):
        assert (one.float() - two.float()).norm() < 0.05 * two.float().norm()


@pytest.mark.gpu
def test_attended_values_are_the_same_bits_in_any_company_and_gradients_are_measured(
    record_property: Callable[[str, object], None],
) -> None:
    """Bits are documented for the way there; what the way back gives is written down with the result."""
    lengths = [40, 300, 7]
    query, key, value = rows(lengths, "cuda", 1)
    form = AttentionForm(0.125)
    kernel = kernel_for(query, key, form)
    assert kernel is not None
    together = PackedSequences(lengths, query.device).attend(kernel, query, key, value, form)
    middle = [each.detach()[:, :, 40:340].requires_grad_(True) for each in (query, key, value)]
    alone = PackedSequences([300], query.device).attend(kernel, *middle, form)
    assert torch.equal(alone, together[:, 40:340])
    upstream = torch.randn_like(together)
    gradients = torch.autograd.grad(together, (query, key, value), upstream)
    of_alone = torch.autograd.grad(alone, middle, upstream[:, 40:340].contiguous())
    same = [torch.equal(one[:, :, 40:340], two) for one, two in zip(gradients, of_alone, strict=True)]
    record_property("gradients_keep_their_bits", same)
    print("gradients of queries, keys and values keep their bits in company:", same)


@pytest.mark.gpu
def test_logits_are_not_rounded_to_half_precision(load: Callable[[str], Any]) -> None:
    bench = load("cuda")
    hidden = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    weight = bench.model.base.get_output_embeddings().weight
    found = bench.model.logits(hidden, [])
    exact = hidden.double() @ weight.double().t()
    # bfloat16 would be off by up to 2^-9 of each.
    assert bench.error(found.double(), exact) < 1e-4
