"""Passes that only decode, as CUDA graphs; what is told to them is tested on a CPU, with a stand-in that records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from twinkle.module.paged_varlen import PAGE_TOKENS
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.cache_kinds import PagedCaches

pytestmark = pytest.mark.gpu

LOGPROB_ERROR = 0.15


def run(bench: Any, *, graphs: bool) -> tuple[dict[str, Any], SteppedTorchSampler]:
    """Samples of several adapters and of the base model that cross into another page and end at unlike times.

    One sequence first: what it has recorded is run again at the end, when all else has grown beside it.
    """
    rng = np.random.default_rng(0)
    sampler = SteppedTorchSampler(bench.model, slots=16, graphs=graphs, caches=PagedCaches(bench.device))
    outcomes: dict[str, Any] = {}
    for numbers in ([0], range(1, 6), [6]):
        add(sampler, bench, rng, numbers)
        while sampler.has_work:
            outcomes |= {outcome.key: outcome for outcome in sampler.step()}
        # What torch keeps of memory is out of a record's reach.
        torch.empty(1 << 28, dtype=torch.uint8, device=bench.device)
    return outcomes, sampler


def add(sampler: SteppedTorchSampler, bench: Any, rng: np.random.Generator, numbers: Iterable[int]) -> None:
    """Ask for samples, by the number of each request."""
    for number in numbers:
        sampler.add(
            SampleRequest(
                key=str(number),
                adapter=bench.adapter(number, rank=3 + 9 * number, size=0.05) if number else None,
                prompt=tuple(rng.integers(3, 300, PAGE_TOKENS - 20 + 9 * number).tolist()),
                seed=number,
                num_samples=1 + number % 3,
                temperature=0.0,
                max_tokens=40 + 15 * number,
                stop_token_ids=frozenset(),
            )
        )


@pytest.mark.parametrize("family", ["long", "hybrid", "experts"])
def test_graphs_sample_what_passes_launched_kernel_by_kernel_do(
    family: str, load_family: Callable[[str, str], Any]
) -> None:
    bench = load_family(family, "cuda")
    launched, _ = run(bench, graphs=False)
    recorded, sampler = run(bench, graphs=True)
    graphs = sampler._passes._graphs
    assert graphs is not None
    assert len(graphs._passes) >= 2, "none was recorded: the log says why"
    assert graphs.size_bytes > 0
    for key, one in launched.items():
        for left, right in zip(one.sequences, recorded[key].sequences, strict=True):
            same = np.flatnonzero(left.tokens != right.tokens)
            end = int(same[0]) if len(same) else len(left.tokens)
            assert end > 0
            assert np.abs(left.logprobs[:end] - right.logprobs[:end]).mean() < LOGPROB_ERROR
    graphs.give_back(1)
    assert graphs.size_bytes == 0
