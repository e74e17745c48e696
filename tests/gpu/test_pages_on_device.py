"""Sampling over pages by torch's own kernel, which only GPUs have; on the CPU a stand-in for it is tested."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.module.paged_varlen import PAGE_TOKENS, PagedKeys, paged_kernel_for
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.varlen import Ends
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.cache_kinds import ContiguousCaches, PagedCaches, caches_for

attention = pytest.importorskip("torch.nn.attention.varlen")
if "block_table" not in inspect.signature(attention.varlen_attn).parameters:
    pytest.skip(f"the kernel of torch {torch.__version__} reads no pages", allow_module_level=True)

HEADS, GROUPS, SIZE = 8, 2, 64
LENGTHS = (1, PAGE_TOKENS, 3 * PAGE_TOKENS + 17, 40)
RELATIVE_ERROR = 0.02
LOGPROB_ERROR = 0.15


def laid_out(lengths: Sequence[int], *, behind: float) -> tuple[list[torch.Tensor], torch.Tensor, np.ndarray]:
    """Queries, keys and values in a row, a pool in which their pages lie backwards, and the table of those."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(lengths), HEADS + 2 * GROUPS, SIZE, generator=generator).to(device, torch.bfloat16)
    packed = list(rows.split((HEADS, GROUPS, GROUPS), dim=1))
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    pool = torch.full((2, sum(counts), PAGE_TOKENS, GROUPS, SIZE), behind, device=device, dtype=torch.bfloat16)
    table, next_page, first = np.zeros((len(lengths), max(counts)), dtype=np.int32), sum(counts), 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for number in range(count):
            next_page -= 1
            table[row, number] = next_page
            start, end = number * PAGE_TOKENS, min(length, (number + 1) * PAGE_TOKENS)
            for side, own in zip(pool, packed[1:], strict=True):
                side[next_page, : end - start] = own[first + start : first + end]
        first += length
    return packed, pool, table


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16, PAGE_TOKENS + 3])
def test_pages_are_attended_as_sequences_are_by_themselves(window: int | None) -> None:
    """Whole prompts, and then the last token of each; a number behind a sequence's end changes nothing."""
    (queries, keys, values), pool, table = laid_out(LENGTHS, behind=100.0)
    form = AttentionForm(0.125, window=window)
    kernel = paged_kernel_for(queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], form)
    assert kernel is not None
    paged = PagedKeys(LENGTHS, table, queries.device)
    found = kernel.attend(queries, *pool, queries=Ends(LENGTHS, queries.device), keys=paged, form=form)[0]
    last = [end - 1 for end in np.cumsum(LENGTHS).tolist()]
    at_end = kernel.attend(
        queries[last], *pool, queries=Ends([1] * len(LENGTHS), queries.device), keys=paged, form=form
    )[0]
    expected = torch.cat(
        [
            attend(
                *(each.transpose(0, 1)[None] for each in own),
                form=form,
                mask=form.mask(0, len(own[0]), 0, queries.device),
            )
            for own in zip(*(each.split(LENGTHS) for each in (queries, keys, values)), strict=True)
        ],
        dim=1,
    )[0].float()
    assert (found.float() - expected).norm() < RELATIVE_ERROR * expected.norm()
    assert (at_end.float() - expected[last]).norm() < RELATIVE_ERROR * expected[last].norm()


@pytest.mark.gpu
def test_a_sequence_gets_the_same_bits_in_any_company_and_nan_behind_its_end_is_looked_at(
    record_property: Callable[[str, object], None],
) -> None:
    """Pages are given on with zeros in them; whether that is needed is written down with the result."""
    (queries, keys, _), pool, table = laid_out(LENGTHS, behind=0.0)
    form = AttentionForm(0.125)
    kernel = paged_kernel_for(queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], form)
    assert kernel is not None
    device = queries.device
    last = [end - 1 for end in np.cumsum(LENGTHS).tolist()]
    ones = Ends([1] * len(LENGTHS), device)
    together = kernel.attend(queries[last], *pool, queries=ones, keys=PagedKeys(LENGTHS, table, device), form=form)[0]
    for row, length in enumerate(LENGTHS):
        own = PagedKeys([length], table[row : row + 1], device)
        alone = kernel.attend(queries[last[row]][None], *pool, queries=Ends([1], device), keys=own, form=form)[0]
        assert torch.equal(alone[0], together[row])
    _, with_nan, _ = laid_out(LENGTHS, behind=float("nan"))
    found = kernel.attend(queries[last], *with_nan, queries=ones, keys=PagedKeys(LENGTHS, table, device), form=form)
    record_property("reads_behind_the_end", bool(found.isnan().any()))
    print("NaN behind a sequence's end shows:", bool(found.isnan().any()))


@pytest.mark.gpu
def test_samples_over_pages_have_the_logprobs_of_contiguous_buffers(load_family: Callable[[str, str], Any]) -> None:
    """Groups whose prompts are longer than a page, of several tenants; one token at a time for 300 tokens."""
    bench = load_family("long", "cuda")
    assert isinstance(caches_for(bench.model), PagedCaches)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 300, 2 * PAGE_TOKENS + 9).tolist()
    requests = [
        SampleRequest(
            key=str(number),
            adapter=bench.adapter(number % 2, size=0.05),
            prompt=(*shared[: PAGE_TOKENS * (1 + number % 2)], *rng.integers(3, 300, 5 + number).tolist()),
            seed=number,
            num_samples=3,
            temperature=0.0,
            max_tokens=300,
            stop_token_ids=frozenset(),
            prompt_logprobs=True,
        )
        for number in range(4)
    ]
    found = []
    for caches in (ContiguousCaches(bench.device), PagedCaches(bench.device)):
        sampler = SteppedTorchSampler(bench.model, slots=16, caches=caches)
        for request in requests:
            sampler.add(request)
        outcomes: dict[str, Any] = {}
        while sampler.has_work:
            outcomes |= {outcome.key: outcome for outcome in sampler.step()}
        found.append(outcomes)
        assert caches.num_held(()) == 0
    for key, one in found[0].items():
        two = found[1][key]
        assert np.nanmean(np.abs(np.array(one.prompt_logprobs[1:]) - np.array(two.prompt_logprobs[1:]))) < LOGPROB_ERROR
        for left, right in zip(one.sequences, two.sequences, strict=True):
            same = np.flatnonzero(left.tokens != right.tokens)
            end = int(same[0]) if len(same) else len(left.tokens)
            assert end > 0
            assert np.abs(left.logprobs[:end] - right.logprobs[:end]).mean() < LOGPROB_ERROR
