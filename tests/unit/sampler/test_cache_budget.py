"""Who gives way when cache memory is full."""

import pytest

from twinkle.sampler.kv_cache import BLOCK_TOKENS, SequenceCache
from twinkle.sampler.planning import CacheBudget, plan_pass
from twinkle.sampler.progress import Continuation, RequestProgress
from twinkle.sampler.request import SampleRequest
from twinkle.sampler.stops import StopRule

MAX_LENGTH = 4 * BLOCK_TOKENS


def running(key, *, samples, blocks):
    """A request whose samples run, each about to outgrow its cache."""
    request = SampleRequest(key=key, adapter=None, prompt=(1,), seed=0, num_samples=samples)
    progress = RequestProgress(
        request, StopRule(frozenset(), (), (), None), max_length=MAX_LENGTH, vocab_size=8, chunk_tokens=32
    )
    progress.waiting.clear()
    for sample in range(samples):
        cache = SequenceCache()
        cache.reserve(blocks * BLOCK_TOKENS)
        progress.running[sample] = Continuation(sample=sample, cache=cache, tokens=[3] * (blocks * BLOCK_TOKENS))
    return progress


@pytest.fixture
def budget():
    return CacheBudget(num_tokens=6 * BLOCK_TOKENS, max_length=MAX_LENGTH)


def plan(active, budget):
    works = plan_pass(active, budget, prefill_tokens=64, keeps_prompts=True)
    return [(work.progress.request.key, work.continuation.sample) for work in works]


def test_newer_requests_give_way_to_older_ones_and_start_anew(budget):
    old, new = running("old", samples=1, blocks=3), running("new", samples=1, blocks=3)
    assert plan([old, new], budget) == [("old", 0)]
    assert old.running[0].cache.blocks == 4
    assert not new.holds_cache
    assert list(new.waiting) == [0]


def test_a_sequence_that_is_the_newest_gives_way_itself(budget):
    old, new = running("old", samples=1, blocks=1), running("new", samples=2, blocks=2)
    old.running[0].tokens.pop()  # still fits its cache
    assert plan([old, new], budget) == [("old", 0), ("new", 0)]
    assert list(new.waiting) == [1]


def test_a_prompt_kept_for_waiting_samples_gives_way_before_those_that_run(budget):
    progress = running("r", samples=2, blocks=2)
    kept = SequenceCache()
    kept.reserve(BLOCK_TOKENS)
    progress.prompt_cache = kept
    assert plan([progress], budget) == [("r", 0), ("r", 1)]
    assert progress.prompt_cache is None
    assert progress.num_blocks == 6


def test_the_last_sequence_always_finds_room(budget):
    progress = running("r", samples=3, blocks=2)
    progress.running[0].cache.reserve(4 * BLOCK_TOKENS - 1)
    assert plan([progress], budget)[0] == ("r", 0)
