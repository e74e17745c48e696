"""Models whose layers carry a state, in the sampler: transformers' tokens, the same bits however they came about."""

import functools

import numpy as np
import pytest
import torch
import transformers

from harness.families import FAMILIES, SAMPLED_WITH_STATES, VOCAB_SIZE, stir
from twinkle.core.errors import ConfigError, OutOfMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler, torch_sampler, unread
from twinkle.sampler.attention import CachedStates
from twinkle.sampler.probe import SamplerProbe

from .conftest import run_to_end

CHUNK = 64
PROMPT_LENGTHS = (1, 3, CHUNK, CHUNK + 1, 150)
NEW_TOKENS = 12

before, commit = CachedStates.before, CachedStates.commit


@pytest.fixture(scope="module", params=SAMPLED_WITH_STATES)
def models(request):
    """The untouched model and the same weights in the engine."""
    plain, ours = (_make(request.param) for _ in range(2))
    return plain, FusedLoraModel(ours, name="tiny")


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron-h"])
def ours(request):
    """One of each kind of state."""
    return loaded(request.param)


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron-h", "deepseek-v4"])
def of_any_memory(request):
    """And one that makes new keys of what it keeps of each token."""
    return loaded(request.param)


@functools.cache
def loaded(family):
    return FusedLoraModel(_make(family), name="tiny")


def _make(family):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()
    stir(model)
    return model


def drawn(seed, length):
    return tuple(np.random.default_rng(seed).integers(6, VOCAB_SIZE, length).tolist())


def asked(key, prompt, adapter=None, **settings):
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "prompt_logprobs": True} | settings
    return SampleRequest(key=key, adapter=adapter, prompt=prompt, seed=1, stop_token_ids=frozenset(), **settings)


def run(model, requests, **options):
    sampler = SteppedTorchSampler(model, **{"slots": 32, "chunk_tokens": CHUNK, **options})
    for request in requests:
        sampler.add(request)
    return run_to_end(sampler)


def bits(result):
    sequences = [(sequence.tokens.tolist(), sequence.logprobs.tobytes()) for sequence in result.sequences]
    return sequences, None if result.prompt_logprobs is None else np.asarray(result.prompt_logprobs).tobytes()


def noisy(model, rank, *, with_nan=False):
    adapter = model.create_adapter(LoraConfig(rank=rank, seed=rank), trainable=False)
    noise = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(rank))
    adapter.params.add_(noise, alpha=float("nan") if with_nan else 0.1)
    return adapter


def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(models):
    plain, ours = models
    requests = [asked(str(length), drawn(length, length)) for length in PROMPT_LENGTHS]

    ended = run(ours, requests)

    for request in requests:
        result, length = ended[request.key], len(request.prompt)
        sequence = result.sequences[0]
        tokens = torch.tensor([*request.prompt, *sequence.tokens.tolist()])
        with torch.inference_mode():
            logprobs = torch.log_softmax(plain(tokens[None]).logits[0].double(), -1)
        assert sequence.tokens.tolist() == logprobs[length - 1 : -1].argmax(-1).tolist()
        scored = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose([*result.prompt_logprobs[1:], *sequence.logprobs], scored, atol=2e-4)


def test_bits_are_the_same_alone_and_beside_others_and_a_nan_tenant(models):
    _, ours = models
    assert ours.determinism != "none"
    adapters = [noisy(ours, 2), noisy(ours, 5)]
    requests = [asked(str(n), drawn(n, length), adapters[n % 2]) for n, length in enumerate(PROMPT_LENGTHS)]
    sick = asked("sick", drawn(9, 40), noisy(ours, 3, with_nan=True))

    together = run(ours, [sick, *requests])

    assert isinstance(together["sick"], Exception)
    for request in requests:
        assert bits(run(ours, [request])[request.key]) == bits(together[request.key])


def test_a_prompt_that_begins_like_another_goes_on_from_the_last_chunk_they_share_with_the_same_bits(of_any_memory):
    shared = drawn(1, 2 * CHUNK + 20)
    settings = {"prompt_logprobs": False, "num_samples": 2, "temperature": 1.0}
    first = asked("first", (*shared, *drawn(2, 9)), **settings)
    others = [asked("same", first.prompt, **settings), asked("longer", (*shared, *drawn(3, 90)), **settings)]
    sampler = SteppedTorchSampler(of_any_memory, slots=8, chunk_tokens=CHUNK)
    sampler.add(first)
    run_to_end(sampler)
    for request in others:
        sampler.add(request)

    ended = run_to_end(sampler)

    assert ended["same"].num_cached_tokens == len(first.prompt)
    assert ended["longer"].num_cached_tokens == 2 * CHUNK
    for request in others:
        assert bits(ended[request.key]) == bits(run(of_any_memory, [request], kept_bytes=0)[request.key])


def test_what_gives_way_for_want_of_memory_ends_with_the_same_bits(of_any_memory):
    requests = [asked(str(n), drawn(n, 100), max_tokens=60, prompt_logprobs=False) for n in range(3)]
    given_up = []

    class Watched(torch_sampler.RequestProgress):
        def drop_last_cache(self):
            given_up.append(self.request.key)
            return super().drop_last_cache()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sampler, "RequestProgress", Watched)
        together = run(of_any_memory, requests, max_length=192, kv_tokens=7 * 64)

    assert given_up
    for request in requests:
        assert bits(together[request.key]) == bits(run(of_any_memory, [request])[request.key])


def test_a_pass_that_did_not_fit_is_made_again_from_the_states_before_it(ours, monkeypatch):
    requests = [asked("short", drawn(1, 5)), asked("long", drawn(2, 150))]
    expected = run(ours, requests)
    draw, calls = unread.start_draws, []

    def sometimes_out_of_memory(*args):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise torch.OutOfMemoryError("no room")
        return draw(*args)

    sampler = SteppedTorchSampler(ours, slots=8, chunk_tokens=CHUNK)
    for request in requests:
        sampler.add(request)
    ended, failures = {}, 0
    monkeypatch.setattr(
        torch_sampler.SteppedTorchSampler,
        "_start_continuations",
        without_failure(torch_sampler.SteppedTorchSampler._start_continuations, draw),
    )
    monkeypatch.setattr(unread, "start_draws", sometimes_out_of_memory)
    while sampler.has_work:
        try:
            ended |= {result.key: result for result in sampler.step()}
        except OutOfMemory:
            failures += 1

    assert failures > 2
    assert {key: bits(result) for key, result in ended.items()} == {key: bits(expected[key]) for key in expected}


def without_failure(start_continuations, draw):
    def start(self):
        failing, unread.start_draws = unread.start_draws, draw
        try:
            return start_continuations(self)
        finally:
            unread.start_draws = failing

    return start


def test_prompts_are_cut_only_where_a_state_can_be_copied(ours):
    with pytest.raises(ConfigError, match="must be a multiple of 64"):
        SteppedTorchSampler(ours, slots=1, chunk_tokens=48)


def test_no_more_sequences_run_at_once_than_their_states_have_room_for(ours):
    sampler = SteppedTorchSampler(ours, slots=8, chunk_tokens=CHUNK, state_bytes=5 * ours.state_bytes)
    requests = [asked(str(n), drawn(n, 20 + n), prompt_logprobs=False, num_samples=2) for n in range(3)]
    for request in requests:
        sampler.add(request)
    ended, held = {}, []
    while sampler.has_work:
        ended |= {result.key: result for result in sampler.step()}
        caches = [
            cache
            for progress in sampler._active
            for cache in (progress.prompt_cache, *(running.cache for running in progress.running.values()))
            if cache is not None and cache.states
        ]
        held.append(sum(tensor.nbytes for cache in caches for state in cache.states.values() for tensor in state))

    assert ours.state_bytes <= max(held) <= 5 * ours.state_bytes
    for request in requests:
        assert bits(ended[request.key]) == bits(run(ours, [request])[request.key])


def test_a_bound_that_holds_no_sequence_is_refused(ours):
    with pytest.raises(ConfigError, match=f"take {2 * ours.state_bytes} bytes, more than TWINKLE_SAMPLER_STATE_BYTES"):
        SteppedTorchSampler(ours, slots=1, chunk_tokens=CHUNK, state_bytes=2 * ours.state_bytes - 1)


LEAKS = {
    "the state of another": ("before", lambda self, layer: before(self, layer)[::-1]),
    "no state": ("before", lambda self, layer: [None for _ in before(self, layer)]),
    "a state that stays where it was": ("commit", lambda self: None),
}


@pytest.mark.parametrize("promise", ["bits", "no bits"])
@pytest.mark.parametrize("leak", LEAKS)
def test_states_that_go_to_the_wrong_sequence_or_nowhere_are_refused_at_start(leak, promise, ours, monkeypatch):
    if promise == "no bits":
        monkeypatch.setattr(ours, "determinism", "none")
    monkeypatch.setattr(CachedStates, *LEAKS[leak])
    with pytest.raises(ConfigError, match="cannot be sampled from"):
        SamplerProbe(ours).check()


def test_a_hybrid_whose_states_go_where_they_belong_is_served(ours):
    SamplerProbe(ours).check()
