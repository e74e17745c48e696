"""Nobody's result depends on the company: not its bits, not its success."""

import numpy as np
import pytest
import torch

from twinkle.core.errors import ConfigError, OutOfMemory, UserError
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler
from twinkle.sampler.kv_cache import BLOCK_TOKENS

from .conftest import VOCAB_SIZE, run_to_end

pytestmark = pytest.mark.usefixtures("either_cache")

RULES = ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.8, "temperature": 1.3})


def mixed_requests(adapters, count=20):
    rng = np.random.default_rng(5)
    return [
        SampleRequest(
            key=f"r{i}",
            adapter=[None, *adapters][i % 4],
            prompt=tuple(rng.integers(6, VOCAB_SIZE, int(rng.integers(1, 90))).tolist()),
            seed=i // 2,
            num_samples=1 + i % 3,
            max_tokens=int(rng.integers(1, 60)),
            stop_token_ids=None if i % 2 else frozenset(),
            prompt_logprobs=i % 3 == 0,
            topk_prompt_logprobs=2 if i % 5 == 0 else 0,
            topk_sample_logprobs=3 if i % 4 == 0 else 0,
            prompt_alt_tokens_k=1 if i % 6 == 0 else 0,
            **RULES[i % 5],
        )
        for i in range(count)
    ]


def bits_of(result):
    """Everything in a result, as bytes."""
    arrays = [result.prompt_logprobs]
    for top in (result.topk_prompt_logprobs, result.prompt_alt_tokens, *(s.topk for s in result.sequences)):
        arrays += [None, None] if top is None else [top.token_ids, top.logprobs]
    for sequence in result.sequences:
        arrays += [sequence.tokens, sequence.logprobs, np.array([sequence.stop_reason])]
    return [None if array is None else array.tobytes() for array in arrays]


@pytest.fixture(scope="module")
def alone(adapters, run_requests):
    """Each request by itself."""
    return {r.key: run_requests([r], chunk_tokens=32)[r.key] for r in mixed_requests(adapters)}


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 64},
        {"slots": 3},
        {"slots": 64, "prefill_tokens_per_step": 32},
        {"slots": 64, "kv_tokens": 5 * BLOCK_TOKENS},
        {"slots": 64, "kv_tokens": 3 * BLOCK_TOKENS},
    ],
    ids=["all at once", "three slots", "slow prefill", "little memory", "memory for one"],
)
def test_a_request_gets_the_same_bits_alone_and_in_company(sampled_model, adapters, run_requests, alone, options):
    assert sampled_model.determinism != "none"
    together = run_requests(mixed_requests(adapters), chunk_tokens=32, **options)
    for key, result in alone.items():
        assert bits_of(together[key]) == bits_of(result), key


def test_adapters_change_what_is_sampled(adapters, run_requests):
    asked = {
        str(i): SampleRequest(
            key=str(i), adapter=adapter, prompt=(7, 8, 9), seed=1, max_tokens=30, stop_token_ids=frozenset()
        )
        for i, adapter in enumerate([None, *adapters])
    }
    ended = run_requests(list(asked.values()))
    assert len({tuple(result.sequences[0].logprobs.tolist()) for result in ended.values()}) == 4


def test_a_request_added_midway_changes_nothing_and_gets_the_same(sampled_model, adapters, alone):
    requests = mixed_requests(adapters)
    sampler = SteppedTorchSampler(sampled_model, slots=16, chunk_tokens=32)
    ended = {}
    while sampler.has_work or requests:
        if requests:
            sampler.add(requests.pop())
        ended.update({outcome.key: outcome for outcome in sampler.step()})
    assert all(bits_of(ended[key]) == bits_of(result) for key, result in alone.items())


def test_a_cancelled_request_is_never_heard_of_again_and_frees_its_place(sampled_model, adapters, alone):
    requests = mixed_requests(adapters)
    sampler = SteppedTorchSampler(sampled_model, slots=4, chunk_tokens=32)
    for asked in requests:
        sampler.add(asked)
    ended = {outcome.key: outcome for outcome in sampler.step()}
    gone = [asked.key for asked in requests if asked.key not in ended][::2]
    for key in gone:
        sampler.cancel(key)
    sampler.cancel("never added")
    ended.update(run_to_end(sampler))
    assert set(ended) == set(alone) - set(gone)
    assert all(bits_of(ended[key]) == bits_of(alone[key]) for key in ended)


@pytest.mark.parametrize("scored", [False, True])
def test_an_adapter_with_nan_weights_fails_its_own_requests_only(sampled_model, adapters, run_requests, alone, scored):
    broken = sampled_model.create_adapter(LoraConfig(rank=2), trainable=False)
    broken.params.fill_(float("nan"))
    broken.publish()
    poison = [
        SampleRequest(key=f"x{i}", adapter=broken, prompt=(7, 8, 9) * (i + 1), seed=0, prompt_logprobs=scored)
        for i in range(3)
    ]
    healthy = mixed_requests(adapters)
    ended = run_requests([poison[0], *healthy[:9], poison[1], *healthy[9:], poison[2]], slots=8, chunk_tokens=32)
    for key in ("x0", "x1", "x2"):
        assert isinstance(ended[key], UserError)
        assert "NaN" in str(ended[key])
    assert all(bits_of(ended[key]) == bits_of(result) for key, result in alone.items())


def test_a_tokenizer_that_fails_fails_its_own_request_only(run_requests):
    def decode(ids):
        raise ValueError("no such token")

    fields = {"adapter": None, "prompt": (7, 8), "seed": 0, "max_tokens": 4}
    ended = run_requests(
        [SampleRequest(key="strings", stop_strings=("x",), **fields), SampleRequest(key="plain", **fields)],
        decode_text=decode,
    )
    assert isinstance(ended["strings"], ValueError)
    assert len(ended["plain"].sequences) == 1


def test_a_pass_that_ran_out_of_memory_can_be_stepped_again(sampled_model, adapters, alone, monkeypatch):
    sampler = SteppedTorchSampler(sampled_model, slots=8, chunk_tokens=32)
    for asked in mixed_requests(adapters):
        sampler.add(asked)
    ended = {outcome.key: outcome for outcome in sampler.step()}

    def out_of_memory(*args):
        raise torch.OutOfMemoryError("device")

    with monkeypatch.context() as broken:
        broken.setattr(sampled_model, "logits", out_of_memory)
        with pytest.raises(OutOfMemory):
            sampler.step()
    ended.update(run_to_end(sampler))
    assert all(bits_of(ended[key]) == bits_of(result) for key, result in alone.items())


def test_a_long_prompt_does_not_hold_up_those_who_decode(sampled_model):
    sampler = SteppedTorchSampler(sampled_model, slots=4, chunk_tokens=16, prefill_tokens_per_step=16)
    fields = {"adapter": None, "seed": 0, "stop_token_ids": frozenset()}
    sampler.add(SampleRequest(key="short", prompt=(7, 8), max_tokens=4, **fields))
    sampler.step()
    sampler.add(SampleRequest(key="long", prompt=(9,) * 150, max_tokens=1, **fields))
    ended_at = {}
    for step in range(40):
        for outcome in sampler.step():
            ended_at[outcome.key] = step
    assert ended_at == {"short": 2, "long": 9}


def test_a_budget_too_small_for_one_sequence_is_refused(sampled_model):
    with pytest.raises(ConfigError, match="kv_tokens"):
        SteppedTorchSampler(sampled_model, slots=4, kv_tokens=2 * BLOCK_TOKENS)
