"""Sampling over pages: the bits of contiguous buffers, prompts held once, and nobody's leavings in a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from harness.families import FAMILIES, stir
from harness.varlen_kernel import VarlenKernel
from twinkle.core.errors import OutOfMemory, UserError
from twinkle.infra.device_memory import DeviceMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler, cache_kinds, paged_attention
from twinkle.sampler.cache_kinds import ContiguousCaches, PagedCaches
from twinkle.sampler.pages import PagePool
from twinkle.sampler.probe import SamplerProbe

from .conftest import PAGE_TOKENS, Paged, run_to_end
from .test_sampler_invariance import bits_of

CHUNK = 64
PROMPT = tuple(np.random.default_rng(1).integers(6, 200, 2 * CHUNK + 5).tolist())
FORMS = ("mistral", "gemma2", "gpt-oss", "llama4", "gemma4", "gemma4-by-layer", "qwen3_5", "nemotron-h", "deepseek-v4")
"""Windows, caps, sinks, chunks, heads of two sizes, layers that share keys, states of two kinds, and records."""


def request(key: str, *, prompt: Sequence[int] = PROMPT, adapter: LoraAdapter | None = None, **fields: Any) -> Any:
    fields = {"seed": 3, "max_tokens": 6, "stop_token_ids": frozenset(), **fields}
    return SampleRequest(key=key, prompt=tuple(prompt), adapter=adapter, **fields)


def drawn(sampler: SteppedTorchSampler, requests: Sequence[SampleRequest]) -> dict[str, Any]:
    for asked in requests:
        sampler.add(asked)
    return {key: bits_of(result) for key, result in run_to_end(sampler).items()}


@pytest.mark.parametrize("family", FORMS)
def test_layers_of_every_form_give_the_bits_of_contiguous_buffers(
    family: str, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginnings that are taken over, samples that share them, and too little memory for all."""
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    stir(base)
    model = FusedLoraModel(base, name="tiny")
    requests = [
        request("one", num_samples=3, prompt_logprobs=True),
        request("same", num_samples=2),
        request("longer", prompt=(*PROMPT[: CHUNK + 9], *PROMPT[:40]), max_tokens=20),
        request("short", prompt=PROMPT[:3], max_tokens=17),
    ]
    options: dict[str, Any] = {"slots": 16, "chunk_tokens": CHUNK, "max_length": 192, "kv_tokens": 6 * CHUNK}
    expected = drawn(SteppedTorchSampler(model, **options, caches=ContiguousCaches(model.device)), requests)

    assert drawn(SteppedTorchSampler(model, **options), requests) == expected
    has_kernel = paged.kernel.function.num_calls > 0
    monkeypatch.setattr(paged_attention, "paged_kernel_for", lambda query, key, form: None)
    assert drawn(SteppedTorchSampler(model, **options), requests) == expected
    packed = VarlenKernel()
    asked = ("gemma2", "gpt-oss")  # caps and sinks, which no kernel knows
    monkeypatch.setattr(paged_attention, "kernel_for", lambda *_: None if family in asked else packed)
    assert drawn(SteppedTorchSampler(model, **options), requests) == expected

    assert has_kernel == (packed.num_calls > 0) == (family not in ("gemma2", "gpt-oss", "deepseek-v4"))


def test_samples_of_a_prompt_share_its_full_pages_and_copy_its_last_one(
    sampled_model: FusedLoraModel, paged: Paged
) -> None:
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK, kept_bytes=0)
    for _ in range(2):
        # A second request with the same prompt has pages of its own, as nothing is kept.
        sampler.add(request("a", num_samples=8))
        while sampler.step() or (sampler.num_requests and sampler._active[0].num_slots < 8):
            pass
        sampler.step()
        pool = paged.made[-1].pool
        full = len(PROMPT) // PAGE_TOKENS
        assert pool.num_owned == full + 8
        run_to_end(sampler)
        assert pool.num_pages == 0


def test_a_kept_prompt_takes_no_memory_while_a_sequence_reads_it(
    sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What everyone holds is what the pool holds, at every step; the device gets back what nobody has."""
    memory = DeviceMemory(2**30, torch.device("cpu"))
    monkeypatch.setattr(sampled_model, "memory", memory)
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK)
    pool = paged.made[-1].pool
    for number in range(3):
        sampler.add(request(str(number), num_samples=3, prompt=(*PROMPT[: CHUNK * (1 + number % 2)], 9)))
    while sampler.has_work:
        sampler.step()
        of_logits = sum(
            kept.next_logits.nbytes for kept in sampler._prefixes._computed.values() if kept.next_logits is not None
        )
        lying = sum(layer.nbytes for layer in pool._layers_2NPGD.values())
        assert sum(memory.held.values()) - of_logits == lying
    assert memory.held["sampled sequences"] == 0
    kept = memory.held["kept prompts"]
    assert kept > 0

    memory.make_room(memory.free_bytes + memory.held["unused pages"])
    assert memory.held["unused pages"] == 0
    assert memory.held["kept prompts"] == kept
    memory.make_room(memory.limit_bytes)
    assert not any(memory.held.values())
    assert pool._layers_2NPGD == {}


def test_pages_that_were_moved_hold_what_they_held(sampled_model: FusedLoraModel, paged: Paged) -> None:
    """The device takes back what nobody has between steps, while others are under way."""
    requests = [request(str(n), prompt=(*PROMPT[: 20 + 30 * n], n + 6), max_tokens=4 + 9 * n, seed=n) for n in range(4)]
    options: dict[str, Any] = {"slots": 16, "chunk_tokens": CHUNK}
    expected = drawn(SteppedTorchSampler(sampled_model, **options), requests)
    sampler = SteppedTorchSampler(sampled_model, **options, kept_bytes=0)
    pool = paged.made[-1].pool
    for asked in requests:
        sampler.add(asked)
    ended = {}
    while sampler.has_work:
        ended |= {result.key: bits_of(result) for result in sampler.step()}
        pool.trim()
        assert pool.size_bytes == 0
    assert ended == expected
    assert pool.epoch > 0


def test_a_page_given_on_with_nan_in_it_changes_nobodys_result(
    sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in reads whole pages, as a kernel may. Without zeros in pages that are given on this fails."""
    broken = sampled_model.create_adapter(LoraConfig(rank=2), trainable=False)
    broken.params.fill_(float("nan"))
    broken.publish()
    healthy = [request(str(n), prompt=PROMPT[n : n + 37], num_samples=2, max_tokens=20) for n in range(3)]
    expected = drawn(SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK), healthy)

    def drawn_after_nan() -> dict[str, Any]:
        sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK, kept_bytes=0)
        for number in range(8):
            sampler.add(request(f"x{number}", adapter=broken, prompt=PROMPT[number:]))
        assert all(isinstance(outcome, UserError) for outcome in run_to_end(sampler).values())
        pool = paged.made[-1].pool
        assert all(layer.isnan().any() for layer in pool._layers_2NPGD.values())
        sampler_outcomes = []
        for asked in healthy:
            sampler.add(asked)
        sampler_outcomes = run_to_end(sampler)
        return {key: bits_of(result) for key, result in sampler_outcomes.items() if not isinstance(result, Exception)}

    assert drawn_after_nan() == expected

    settle = PagePool.settle

    def without_zeros(self: PagePool) -> None:
        self._fresh.clear()
        settle(self)

    monkeypatch.setattr(PagePool, "settle", without_zeros)
    assert drawn_after_nan() == {}


def test_a_pool_that_cannot_grow_loses_no_request(
    sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [request(str(n), prompt=PROMPT[n:], num_samples=2, max_tokens=30) for n in range(3)]
    options: dict[str, Any] = {"slots": 16, "chunk_tokens": CHUNK}
    expected = drawn(SteppedTorchSampler(sampled_model, **options), requests)
    settle, calls = PagePool.settle, []

    def sometimes_out_of_memory(self: PagePool) -> None:
        calls.append(1)
        if len(calls) % 3 == 0:
            self._grow()
            raise torch.OutOfMemoryError("no room")
        settle(self)

    monkeypatch.setattr(PagePool, "settle", sometimes_out_of_memory)
    sampler = SteppedTorchSampler(sampled_model, **options)
    for asked in requests:
        sampler.add(asked)
    ended, failures = {}, 0
    while sampler.has_work:
        try:
            ended |= {result.key: bits_of(result) for result in sampler.step()}
        except OutOfMemory:
            failures += 1
    assert failures > 2
    assert ended == expected


def test_a_device_out_of_memory_gets_back_what_kept_prompts_took(
    sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK)
    pool = paged.made[-1].pool
    drawn(sampler, [request(str(number), prompt=(number + 6, *PROMPT)) for number in range(4)])
    before = pool.num_pages
    sampler.add(request("last", prompt=PROMPT[:40]))
    with monkeypatch.context() as broken:
        broken.setattr(sampled_model, "logits", out_of_memory)
        with pytest.raises(OutOfMemory):
            sampler.step()
    sampler.step()
    assert pool.num_pages < before // 4
    assert {layer.shape[1] for layer in pool._layers_2NPGD.values()} == {pool.num_pages}
    run_to_end(sampler)


def test_kept_prompts_give_way_before_the_pool_outgrows_its_device(
    sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator that refuses what is above the limit refuses nothing, and what is drawn is the same."""
    kept = [request(f"kept {number}", prompt=(number + 6, *PROMPT)) for number in range(4)]
    requests = [request(str(n), prompt=(n + 90, *PROMPT[: 60 + n]), max_tokens=40) for n in range(4)]
    options: dict[str, Any] = {"slots": 16, "chunk_tokens": CHUNK}
    expected = drawn(SteppedTorchSampler(sampled_model, **options, kept_bytes=0), requests)

    memory = DeviceMemory(2**30, torch.device("cpu"))
    monkeypatch.setattr(sampled_model, "memory", memory)
    sampler = SteppedTorchSampler(sampled_model, **options)
    pool = paged.made[-1].pool
    drawn(sampler, kept)
    pool.trim()
    before = memory.held["kept prompts"]
    memory.limit_bytes = sum(memory.held.values()) + 4 * pool.page_bytes
    new_empty = torch.Tensor.new_empty

    def within_limit(like: torch.Tensor, *shape: int) -> torch.Tensor:
        lying = sum(layer.nbytes for layer in pool._layers_2NPGD.values())
        made = new_empty(like, *shape)
        if lying + made.nbytes > memory.limit_bytes:
            raise torch.OutOfMemoryError("no room")
        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", within_limit)
    assert drawn(sampler, requests) == expected
    assert 0 < memory.held["kept prompts"] < before


def out_of_memory(*args: object) -> None:
    raise torch.OutOfMemoryError("device")


def test_what_is_cancelled_or_shut_down_leaves_no_page(sampled_model: FusedLoraModel, paged: Paged) -> None:
    sampler = SteppedTorchSampler(sampled_model, slots=4, chunk_tokens=CHUNK)
    pool = paged.made[-1].pool
    for number in range(4):
        sampler.add(request(str(number), prompt=PROMPT[number:], num_samples=2, max_tokens=30))
    for number in range(3):
        sampler.step()
        sampler.cancel(str(number))
    assert pool.num_owned > 0
    sampler.cancel("3")
    assert pool.num_owned == 0
    sampler.add(request("last"))
    sampler.step()
    sampler.shutdown()
    assert pool.num_pages == 0


@pytest.mark.parametrize("has_kernel", [True, False])
def test_pages_are_kept_where_a_layer_has_a_kernel_that_reads_them(
    has_kernel: bool, sampled_model: FusedLoraModel, paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Callable[..., Any] = paged.kernel_for if has_kernel else lambda query, key, form: None
    assert isinstance(cache_kinds.caches_for(sampled_model), ContiguousCaches)
    monkeypatch.setattr(cache_kinds, "is_quick", lambda device_type, dtype: True)
    monkeypatch.setattr(cache_kinds, "paged_kernel_for", asked)
    assert isinstance(cache_kinds.caches_for(sampled_model), PagedCaches if has_kernel else ContiguousCaches)


def test_a_start_that_checks_requests_apart_checks_pages_too(sampled_model: FusedLoraModel, paged: Paged) -> None:
    SamplerProbe(sampled_model).check()
    assert paged.kernel.function.num_calls
