"""Who gives way when cache memory is full."""

import pytest
import torch

from twinkle.sampler.cache_kinds import ContiguousCaches, PagedCaches
from twinkle.sampler.kv_cache import BLOCK_TOKENS
from twinkle.sampler.planning import CacheBudget, plan_pass
from twinkle.sampler.progress import Continuation, RequestProgress
from twinkle.sampler.request import SampleRequest
from twinkle.sampler.stops import StopRule

MAX_LENGTH = 4 * BLOCK_TOKENS


@pytest.fixture(params=["buffers", "pages"])
def caches(request):
    device = torch.device("cpu")
    return ContiguousCaches(device) if request.param == "buffers" else PagedCaches(device, page_tokens=BLOCK_TOKENS)


def cache_of(caches, blocks):
    cache = caches.new()
    cache.make_room(0, blocks * BLOCK_TOKENS)
    return cache


def running(caches, key, *, samples, blocks):
    """A request whose samples run, each about to outgrow its cache."""
    request = SampleRequest(key=key, adapter=None, prompt=(1,), seed=0, num_samples=samples)
    progress = RequestProgress(
        request, StopRule(frozenset(), (), (), None), max_length=MAX_LENGTH, vocab_size=8, chunk_tokens=32
    )
    progress.waiting.clear()
    for sample in range(samples):
        cache = cache_of(caches, blocks)
        progress.running[sample] = Continuation(sample=sample, cache=cache, tokens=[3] * (blocks * BLOCK_TOKENS))
    return progress


@pytest.fixture
def budget(caches):
    return CacheBudget(num_tokens=6 * BLOCK_TOKENS, max_length=MAX_LENGTH, caches=caches)


def plan(active, budget):
    works = plan_pass(active, budget, prefill_tokens=64, keeps_prompts=True)
    return [(work.progress.request.key, work.continuation.sample) for work in works]


def test_newer_requests_give_way_to_older_ones_and_start_anew(caches, budget):
    old, new = running(caches, "old", samples=1, blocks=3), running(caches, "new", samples=1, blocks=3)
    assert plan([old, new], budget) == [("old", 0)]
    assert old.running[0].cache.blocks == 4
    assert not new.holds_cache
    assert list(new.waiting) == [0]


def test_a_sequence_that_is_the_newest_gives_way_itself(caches, budget):
    old, new = running(caches, "old", samples=1, blocks=1), running(caches, "new", samples=2, blocks=2)
    old.running[0].tokens.pop()  # still fits its cache
    assert plan([old, new], budget) == [("old", 0), ("new", 0)]
    assert list(new.waiting) == [1]


def test_a_prompt_kept_for_waiting_samples_gives_way_before_those_that_run(caches, budget):
    progress = running(caches, "r", samples=2, blocks=2)
    progress.prompt_cache = cache_of(caches, 1)
    assert plan([progress], budget) == [("r", 0), ("r", 1)]
    assert progress.prompt_cache is None
    assert caches.num_blocks(progress.caches) == caches.num_held(progress.caches) == 6


def test_the_last_sequence_always_finds_room(caches, budget):
    progress = running(caches, "r", samples=3, blocks=2)
    progress.running[0].cache.make_room(2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS - 1)
    assert plan([progress], budget)[0] == ("r", 0)


def test_a_page_that_others_give_up_needs_no_copy():
    """One sequence as long as the budget is large, whose last page a fork and a kept prompt have, too."""
    caches = PagedCaches(torch.device("cpu"), page_tokens=BLOCK_TOKENS)
    budget = CacheBudget(num_tokens=MAX_LENGTH, max_length=MAX_LENGTH, caches=caches)
    progress = running(caches, "r", samples=1, blocks=4)
    cache = progress.running[0].cache
    progress.running[0].tokens = [3] * (MAX_LENGTH - 2)
    kept = cache.keep(3 * BLOCK_TOKENS, MAX_LENGTH - 2)
    fork = cache.fork()
    progress.running[1] = Continuation(sample=1, cache=fork, tokens=[3] * (MAX_LENGTH - 2))

    assert cache.num_missing(MAX_LENGTH - 2, MAX_LENGTH - 1) == 1
    assert plan([progress], budget) == [("r", 0)]
    assert list(progress.waiting) == [1]
    assert caches.pool.num_owned == 4
    assert cache.pages[3] not in kept.pages  # what is kept stays as it was
    assert caches.pool.num_pages == 5
