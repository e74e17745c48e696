"""Prompts that begin alike are computed once, and nobody can tell from what comes out."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from twinkle.core.errors import OutOfMemory
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler

from .conftest import PAGE_TOKENS, VOCAB_SIZE, run_to_end
from .test_sampler_invariance import bits_of

pytestmark = pytest.mark.usefixtures("either_cache")

CHUNK = 32
PROMPT = tuple(np.random.default_rng(7).integers(6, VOCAB_SIZE, 2 * CHUNK + 9).tolist())


def request(key, *, prompt=PROMPT, adapter=None, **fields):
    fields = {"seed": 3, "max_tokens": 6, "stop_token_ids": frozenset(), **fields}
    return SampleRequest(key=key, prompt=prompt, adapter=adapter, **fields)


def in_turn(sampler, requests):
    """Each request after the one before it has ended."""
    ended = {}
    for asked in requests:
        sampler.add(asked)
        ended.update(run_to_end(sampler))
    return ended


@pytest.fixture
def sampler(sampled_model):
    return SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK)


@pytest.fixture
def num_computed(sampled_model: FusedLoraModel, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokens the model has computed since the last call."""
    passes: list[int] = []
    run_packed = sampled_model.run_packed

    def counted(token_ids_T, *others):
        passes.append(len(token_ids_T))
        return run_packed(token_ids_T, *others)

    monkeypatch.setattr(sampled_model, "run_packed", counted)

    def num_tokens():
        total = sum(passes)
        passes.clear()
        return total

    return num_tokens


def test_a_group_computes_its_prompt_once(sampler, num_computed):
    group = [request(str(i), seed=i) for i in range(8)]
    for asked in group:
        sampler.add(asked)
    ended = run_to_end(sampler)

    assert num_computed() == len(PROMPT) + 8 * 5  # the first token of a sample comes with its prompt
    assert len({tuple(result.sequences[0].tokens) for result in ended.values()}) > 1


def test_a_prompt_that_begins_alike_computes_only_its_own_chunks(sampler, num_computed):
    turn = request("turn", max_tokens=1)
    in_turn(sampler, [turn])
    num_computed()

    in_turn(sampler, [request("next", prompt=(*PROMPT, 9, 8, 7), max_tokens=1)])

    assert num_computed() == 9 + 3


def test_a_stranger_cannot_tell_that_a_prompt_was_sent_before(sampler, num_computed):
    victim = request("victim", cache_group="tenant:victim", max_tokens=1)
    (sent,) = in_turn(sampler, [victim]).values()
    assert (num_computed(), sent.num_cached_tokens) == (len(PROMPT), 0)

    (probed,) = in_turn(sampler, [replace(victim, key="probe", cache_group="tenant:stranger")]).values()
    assert (num_computed(), probed.num_cached_tokens) == (len(PROMPT), 0)
    (again,) = in_turn(sampler, [replace(victim, key="again")]).values()
    assert (num_computed(), again.num_cached_tokens) == (0, len(PROMPT))


def test_nor_that_somebody_sends_it_in_the_same_moment(sampler, num_computed):
    asked = [
        request(f"{group}-{i}", cache_group=group, max_tokens=1)
        for i in range(2)
        for group in ("tenant:victim", "tenant:stranger")
    ]
    for one in asked:
        sampler.add(one)
    ended = run_to_end(sampler)

    assert num_computed() == 2 * len(PROMPT)
    assert [ended[one.key].num_cached_tokens for one in asked] == [0, 0, len(PROMPT), len(PROMPT)]


def test_the_samples_of_one_request_are_no_hits_and_neither_is_what_it_has_to_compute_twice(sampled_model):
    # Room for one sequence and a little: the samples give way to each other and start anew.
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK, max_length=128, kv_tokens=2 * 128)
    asked = [request(str(i), prompt=(i + 9, *PROMPT[1:]), num_samples=3, max_tokens=50) for i in range(3)]
    for one in asked:
        sampler.add(one)

    assert [result.num_cached_tokens for result in run_to_end(sampler).values()] == [0, 0, 0]


def test_what_was_taken_over_shows_in_no_bit(sampled_model, adapters, run_requests):
    assert sampled_model.determinism != "none"
    prompts = [PROMPT, (*PROMPT, 9, 8), PROMPT[: 2 * CHUNK], PROMPT[:CHUNK], (*PROMPT[:CHUNK], *PROMPT)]
    requests = [
        request(f"{name}{i}", prompt=prompt, adapter=adapter, **asked)
        for name, adapter in (("base", None), ("adapter", adapters[2]))
        for i, prompt in enumerate(prompts)
        for asked in (
            {},
            {"prompt_logprobs": True, "num_samples": 2},
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 5},
        )
    ]
    requests = [replace(asked, key=f"{asked.key}-{i}") for i, asked in enumerate(requests)]
    alone = {asked.key: run_requests([asked], chunk_tokens=CHUNK)[asked.key] for asked in requests}

    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=CHUNK)
    one_by_one = in_turn(sampler, requests)
    for ended in (
        one_by_one,
        run_requests(requests, chunk_tokens=CHUNK),
        run_requests(requests[::-1], chunk_tokens=CHUNK),
    ):
        for key, result in alone.items():
            assert bits_of(ended[key]) == bits_of(result), key


def test_changed_weights_begin_anew(sampled_model, sampler, run_requests):
    adapter = sampled_model.create_adapter(LoraConfig(rank=2, seed=5))
    (before,) = in_turn(sampler, [request("r", adapter=adapter)]).values()
    for pair in adapter.views.values():
        pair.b.fill_(0.05)
    adapter.publish()

    (after,) = in_turn(sampler, [request("r", adapter=adapter)]).values()

    assert bits_of(after) != bits_of(before)
    assert bits_of(after) == bits_of(run_requests([request("r", adapter=adapter)], chunk_tokens=CHUNK)["r"])


def test_scores_are_computed_for_whoever_asks_for_them(sampler, num_computed):
    in_turn(sampler, [request("plain", max_tokens=1)])
    num_computed()

    in_turn(sampler, [request("whole", max_tokens=1, prompt_logprobs=True)])
    assert num_computed() == len(PROMPT)
    in_turn(sampler, [request("end", max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=9)])
    assert num_computed() == CHUNK + 9  # the first of the nine is scored from the last token of the chunk before


@pytest.mark.parametrize(("kept_prompts", "computed"), [(0, 2 * len(PROMPT)), (1, len(PROMPT)), (2, 0)])
def test_prompts_not_wanted_for_the_longest_time_leave(sampled_model, num_computed, kept_prompts, computed):
    config = sampled_model.config
    num_tokens = -(-len(PROMPT) // PAGE_TOKENS) * PAGE_TOKENS  # the last page is kept whole
    num_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * num_tokens
    sampler = SteppedTorchSampler(
        sampled_model, slots=16, chunk_tokens=CHUNK, kept_bytes=int(kept_prompts * (num_bytes + 4 * VOCAB_SIZE))
    )
    first, second = request("first", max_tokens=1), request("second", prompt=PROMPT[::-1], max_tokens=1)
    in_turn(sampler, [first, second])
    num_computed()

    in_turn(sampler, [second, first])

    assert num_computed() == computed


def test_a_device_out_of_memory_loses_what_was_kept_and_no_request(sampled_model, sampler, num_computed, monkeypatch):
    (before,) = in_turn(sampler, [request("r")]).values()
    sampler.add(request("r", prompt=(*PROMPT, 9)))
    with monkeypatch.context() as broken:
        broken.setattr(sampled_model, "logits", out_of_memory)
        with pytest.raises(OutOfMemory):
            sampler.step()
    run_to_end(sampler)
    num_computed()

    (after,) = in_turn(sampler, [request("r")]).values()

    assert num_computed() > 5
    assert bits_of(after) == bits_of(before)


def out_of_memory(*args):
    raise torch.OutOfMemoryError("device")
