"""Large samples of one tenant beside small ones of others: a place within a step, and everybody's own bits."""

from __future__ import annotations

import numpy as np
import pytest

from twinkle.sampler import SampleRequest, SteppedTorchSampler


def asked(key, *, group, num_samples=1, max_tokens=3, prompt=(5, 6, 7), seed=11):
    return SampleRequest(
        key=key,
        adapter=None,
        prompt=prompt,
        seed=seed,
        num_samples=num_samples,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        cache_group=group,
    )


def run(sampler, requests, arrivals=()):
    """All results, and after how many steps each came; arrivals are added before the step of their number."""
    due = dict(arrivals)
    for request in requests:
        sampler.add(request)
    found, at = {}, {}
    number = 0
    while sampler.has_work or due:
        if number in due:
            sampler.add(due.pop(number))
        for result in sampler.step():
            found[result.key], at[result.key] = result, number
        number += 1
    return found, at


def same(one, other):
    return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one.sequences, other.sequences, strict=True))


@pytest.mark.parametrize("kv_tokens", [None, 192])
def test_a_large_sample_leaves_places_to_others_and_keeps_its_bits(sampled_model, kv_tokens):
    large = asked("large", group="tenant:a", num_samples=12, max_tokens=100)
    small = [asked(f"small{n}", group=f"tenant:{n}", prompt=(n, 9), seed=n) for n in (1, 2)]
    alone, _ = run(SteppedTorchSampler(sampled_model, slots=8, kept_bytes=0), [large])
    sampler = SteppedTorchSampler(sampled_model, slots=8, kept_bytes=0, kv_tokens=kv_tokens)

    found, at = run(sampler, [large], [(20, small[0]), (23, small[1])])

    assert at["small1"] <= 20 + 6
    assert at["small2"] <= 23 + 6
    assert at["large"] > 100
    assert same(found["large"], alone["large"])


def test_one_tenant_alone_has_all_the_slots(sampled_model):
    large = asked("large", group="tenant:a", num_samples=8, max_tokens=30)

    _, at = run(SteppedTorchSampler(sampled_model, slots=8, kept_bytes=0), [large])

    assert at["large"] < 2 * 30


def test_two_large_samples_share_the_slots(sampled_model):
    first, second = (asked(name, group=name, num_samples=16, max_tokens=30) for name in ("a", "b"))

    _, at = run(SteppedTorchSampler(sampled_model, slots=8, kept_bytes=0), [first], [(5, second)])

    assert at["b"] < 2 * at["a"]
