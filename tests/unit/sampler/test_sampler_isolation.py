"""No request of the sampler's batch feels another: with one that would, a worker does not start."""

from itertools import accumulate

import pytest
import torch

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.module.segmented import Route
from twinkle.sampler.attention import CachedAttention
from twinkle.sampler.kv_cache import SequenceCache
from twinkle.sampler.paged_attention import PagedAttention
from twinkle.sampler.paged_cache import PagedCache
from twinkle.sampler.pages import PagePool
from twinkle.sampler.probe import SamplerProbe
from twinkle.workers.engines.transformers_engine import TransformersEngine

attend, attend_pages, pairs = CachedAttention.__call__, PagedAttention.__call__, Route.pairs


def see_the_piece_before(self, layer, query, key, value, *, form):
    """Each token's values also hold a little of the token before it in the pass."""
    leaked = torch.nn.functional.pad(value, (0, 0, 1, 0))[:, :, :-1]
    return attend(self, layer, query, key, value + 1e-3 * leaked, form=form)


def see_whoever_decodes(self, layer, query, key, value, *, form):
    """Single tokens feel each other's values; prompts are kept apart."""
    ends = list(accumulate(piece.num_tokens for piece in self._pieces))
    rows = [end - 1 for end, piece in zip(ends, self._pieces, strict=True) if piece.num_tokens == 1]
    value = value.index_add(2, torch.tensor(rows, dtype=torch.int64), 1e-3 * value[:, :, rows[::-1]])
    return attend(self, layer, query, key, value, form=form)


def one_row_too_far(self, path):
    last = max((segment.end for segment in self.segments), default=0)
    return (pair._replace(end=min(pair.end + 1, last)) for pair in pairs(self, path))


LEAKS = {
    "attention to the prompt before": (CachedAttention, "__call__", see_the_piece_before),
    "decoding with another's values": (CachedAttention, "__call__", see_whoever_decodes),
    "one cache for two continuations": (SequenceCache, "fork", lambda self: self),
    "an adapter that reaches one row too far": (Route, "pairs", one_row_too_far),
}


@pytest.mark.parametrize("promise", ["bits", "no bits"])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_batch_that_lets_one_request_into_another_is_refused(leak, promise, sampled_model, monkeypatch):
    if promise == "no bits":
        monkeypatch.setattr(sampled_model, "determinism", "none")
    monkeypatch.setattr(*LEAKS[leak])
    with pytest.raises(ConfigError, match="cannot be sampled from"):
        SamplerProbe(sampled_model).check()


PAGED_LEAKS = {
    "attention to the prompt before": (
        PagedAttention,
        "__call__",
        lambda self, layer, query, key, value, *, form: attend_pages(
            self, layer, query, key, value + 1e-3 * torch.nn.functional.pad(value, (0, 0, 1, 0))[:, :, :-1], form=form
        ),
    ),
    "one cache for two continuations": (PagedCache, "fork", lambda self: self),
    "a page that is written for all who have it": (PagePool, "own_alone", lambda self, page: page),
}


@pytest.mark.parametrize("leak", PAGED_LEAKS)
def test_nor_is_one_that_lets_them_in_through_pages(leak, sampled_model, paged, monkeypatch):
    monkeypatch.setattr(*PAGED_LEAKS[leak])
    with pytest.raises((ConfigError, AssertionError)):
        SamplerProbe(sampled_model).check()
    assert paged.made


@pytest.mark.parametrize("promise", ["bits", "no bits"])
def test_a_batch_that_keeps_requests_apart_is_served(promise, sampled_model, monkeypatch):
    if promise == "no bits":
        monkeypatch.setattr(sampled_model, "determinism", "none")
    SamplerProbe(sampled_model).check()


def test_a_worker_does_not_start_with_such_a_sampler(model_folder, monkeypatch):
    monkeypatch.setattr(CachedAttention, "__call__", see_the_piece_before)
    with pytest.raises(ConfigError, match="cannot be sampled from"):
        TransformersEngine.from_settings(Settings(model=str(model_folder), threads=1))
