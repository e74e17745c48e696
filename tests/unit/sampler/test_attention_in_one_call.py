"""The sampler where a device attends all its sequences in one call: what it draws is what it draws without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from harness.varlen_kernel import VarlenKernel
from twinkle.module.lora import LoraAdapter
from twinkle.module.scaled_attention import AttentionForm
from twinkle.sampler import SampleRequest, SampleResult
from twinkle.sampler.attention import CachedAttention, Piece
from twinkle.sampler.kv_cache import SequenceCache

PROMPTS = (5, 70, 17, 64)
KERNEL_FOR = "twinkle.sampler.attention.kernel_for"
HEADS, GROUPS, SIZE = 4, 2, 16


def test_one_call_for_all_sequences_draws_what_a_call_for_each_draws(
    run_requests: Callable[..., dict[str, SampleResult]],
    adapters: Sequence[LoraAdapter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(
            key=str(index),
            adapter=[*adapters, None][index],
            prompt=tuple(rng.integers(3, 200, length).tolist()),
            seed=index,
            max_tokens=9,
            num_samples=2,
            stop_token_ids=frozenset(),
        )
        for index, length in enumerate(PROMPTS)
    ]
    expected = run_requests(requests, chunk_tokens=32)
    kernel = VarlenKernel()
    monkeypatch.setattr(KERNEL_FOR, lambda query, key, form: kernel)

    found = run_requests(requests, chunk_tokens=32)

    assert kernel.num_calls
    for key, result in expected.items():
        for one, two in zip(result.sequences, found[key].sequences, strict=True):
            assert list(two.tokens) == list(one.tokens)
            np.testing.assert_allclose(two.logprobs, one.logprobs, atol=1e-4)


@pytest.mark.parametrize("window", [None, 16])
def test_pieces_see_what_their_caches_hold_and_no_more_than_their_window(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pieces of one prompt, a single token far behind its window's end, and a whole prompt."""
    form = AttentionForm(0.25, window=window)

    def attend_all() -> list[torch.Tensor]:
        caches = [SequenceCache() for _ in range(3)]
        for cache in caches:
            cache.reserve(64)
        passes = [
            [Piece(caches[0], 0, 20), Piece(caches[1], 0, 40), Piece(caches[0], 20, 12)],
            [Piece(caches[1], 40, 1), Piece(caches[2], 0, 7), Piece(caches[0], 32, 5)],
        ]
        generator = torch.Generator().manual_seed(0)
        attended = []
        for pieces in passes:
            num_tokens = sum(piece.num_tokens for piece in pieces)
            query, key, value = (
                torch.randn(1, num_tokens, heads, SIZE, generator=generator).transpose(1, 2)
                for heads in (HEADS, GROUPS, GROUPS)
            )
            attention = CachedAttention(pieces, torch.device("cpu"))
            attended += [attention(layer, query, key, value, form=form) for layer in range(2)]
        return attended

    expected = attend_all()
    kernel = VarlenKernel()
    monkeypatch.setattr(KERNEL_FOR, lambda query, key, form: kernel)
    found = attend_all()

    assert kernel.num_calls == 4
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
