"""Distributions of chosen tokens, stop rules, uniform numbers: the parts that need no model."""

import numpy as np
import pytest
import torch

from twinkle.sampler.choice import ChoiceRule, choose, scaled_logprobs
from twinkle.sampler.drawing import uniform
from twinkle.sampler.kv_cache import BLOCK_TOKENS, SequenceCache
from twinkle.sampler.stops import StopRule, decoded_tail

NUM_DRAWS = 20000
LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.5, 2.5, 0.0, -20.0])


def expected_distribution(rule):
    """Straight from the definitions, one token at a time."""
    probs = torch.softmax(LOGITS.double() / rule.scale, -1).numpy()
    probs[list(rule.barred)] = 0
    probs /= probs.sum()
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    if rule.top_k > 0:
        ranked = ranked[: rule.top_k]
    mass = sum(probs[token] for token in ranked)
    kept, before = [], 0.0
    for token in ranked:
        if before < rule.top_p * mass or rule.top_p == 1:
            kept.append(token)
        before += probs[token]
    expected = np.zeros_like(probs)
    expected[kept] = probs[kept] / probs[kept].sum()
    return expected


@pytest.mark.parametrize(
    "rule",
    [
        ChoiceRule(),
        ChoiceRule(temperature=0.5),
        ChoiceRule(temperature=3.0),
        ChoiceRule(top_k=3),
        ChoiceRule(top_p=0.7),
        ChoiceRule(top_p=0.02),
        ChoiceRule(temperature=1.5, top_k=4, top_p=0.8),
        ChoiceRule(top_k=2, top_p=0.5),
        ChoiceRule(top_k=100),
        ChoiceRule(barred=(0, 3)),
        ChoiceRule(temperature=1.5, top_k=4, top_p=0.8, barred=(1,)),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_that_was_asked_for(rule):
    rules = [rule] * NUM_DRAWS
    logprobs = scaled_logprobs(LOGITS.expand(NUM_DRAWS, -1), rules)
    tokens = choose(logprobs, rules, [uniform(11, 0, position) for position in range(NUM_DRAWS)]).numpy()
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = expected_distribution(rule) * NUM_DRAWS
    assert not counts[expected == 0].any()
    drawn = expected > 5
    chi_square = ((counts[drawn] - expected[drawn]) ** 2 / expected[drawn]).sum()
    assert chi_square < 24.3  # 0.1 % of 7 degrees of freedom


def test_a_row_keeps_its_token_and_its_bits_among_rows_with_other_rules():
    rules = [
        ChoiceRule(),
        ChoiceRule(temperature=0.3),
        ChoiceRule(top_k=2),
        ChoiceRule(temperature=0),
        ChoiceRule(top_p=0.5),
    ]
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = [0.1, 0.9, 0.6, 0.5, 0.99]
    logprobs = scaled_logprobs(logits, rules)
    tokens = choose(logprobs, rules, uniforms)
    for row in range(5):
        alone = scaled_logprobs(logits[row : row + 1], rules[row : row + 1])
        assert torch.equal(alone[0], logprobs[row])
        assert choose(alone, rules[row : row + 1], uniforms[row : row + 1]).item() == tokens[row].item()


def test_extremes_never_choose_a_token_without_probability():
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, float("-inf")]])
    almost_one = float(np.nextafter(1.0, 0.0))
    for rule in (ChoiceRule(), ChoiceRule(top_p=0.999), ChoiceRule(top_k=3), ChoiceRule(temperature=1e-6)):
        for number in (0.0, 0.5, almost_one):
            assert choose(scaled_logprobs(logits, [rule]), [rule], [number]).item() in (1, 2)


def test_a_tiny_temperature_is_as_good_as_greedy():
    rule = ChoiceRule(temperature=1e-30)
    logprobs = scaled_logprobs(LOGITS[None] * 1e4, [rule])
    assert choose(logprobs, [rule], [0.999]).item() == 1
    assert logprobs[0, 1].item() == 0.0


def test_uniform_numbers_are_even_and_fixed_for_ever():
    # Results of accepted operations are replayed with these numbers: they must never change.
    assert uniform(0, 0, 0) == 0.13870941014555427
    numbers = np.array([uniform(seed, stream, at) for seed in (0, 1) for stream in range(50) for at in range(200)])
    assert len(set(numbers.tolist())) == len(numbers)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 0.1 % of 19 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_stop_string_matches_across_tokens_and_only_when_complete():
    rule = StopRule(frozenset(), (), ("\n\nUser:", "stop"), decode_bytes)
    tokens = list(b"don't sto\n\nUse\n\nUser:")
    ends = [end for end in range(1, len(tokens) + 1) if rule.matches(tokens[:end])]
    assert ends == [len(tokens)]


def test_a_stop_string_matches_when_its_last_character_is_complete():
    rule = StopRule(frozenset(), (), ("né→",), decode_bytes)
    tokens = list("xné→".encode())
    assert [rule.matches(tokens[:end]) for end in range(1, len(tokens) + 1)] == [False] * 6 + [True]


def test_a_stop_string_is_found_among_tokens_that_decode_to_nothing():
    rule = StopRule(frozenset(), (), ("ab",), lambda ids: "".join("ab"[i] if i < 2 else "" for i in ids))
    assert rule.matches([0, *[7] * 500, 1])


def test_only_a_bounded_tail_is_decoded():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return decode_bytes(ids)

    assert decoded_tail(decode, list(b"x" * 10000), num_bytes=5).endswith("xxxxx")
    assert max(seen) < 20


def test_stop_tokens_and_sequences_match_at_the_end_only():
    rule = StopRule(frozenset({9}), ((1, 2), (3,)), (), None)
    assert [rule.matches(tokens) for tokens in ([9], [9, 4], [1, 2], [1, 2, 4], [2], [3])] == [
        True, False, True, False, False, True
    ]  # fmt: skip


def test_a_cache_keeps_what_it_holds_when_it_grows_and_when_it_is_forked():
    cache = SequenceCache()
    cache.reserve(BLOCK_TOKENS)
    first = torch.randn(1, 2, BLOCK_TOKENS, 4)
    cache.write(0, 0, torch.stack((first, -first)))
    copy = cache.fork()
    cache.reserve(BLOCK_TOKENS + 1)
    key, value = cache.write(0, BLOCK_TOKENS, torch.stack((torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))))
    assert (cache.blocks, copy.blocks) == (2, 1)
    assert torch.equal(key[:, :, :BLOCK_TOKENS], first)
    assert torch.equal(value[:, :, :BLOCK_TOKENS], -first)
    copied, _ = copy.write(0, BLOCK_TOKENS - 1, torch.ones(2, 1, 2, 1, 4))
    assert torch.equal(copied[:, :, :-1], first[:, :, :-1])
    assert torch.equal(key[:, :, :BLOCK_TOKENS], first)
