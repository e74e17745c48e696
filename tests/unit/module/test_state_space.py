"""The recurrence of Mamba-2 over packed sequences: transformers' numbers, the same bits wherever it is cut."""

from itertools import pairwise

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from twinkle.model.fused.determinism import prepare_environment
from twinkle.module.packed_states import SpanChunks
from twinkle.module.recurrence import CHUNK_TOKENS
from twinkle.module.state_space import SpaceInputs, StateSpace

prepare_environment()

LENGTHS = (5, 130, 1, 64, 200, 3)
HEADS, GROUPS, KEY, VALUE = 4, 2, 16, 8
RATES = torch.tensor([-0.5, -1.0, -2.0, -4.0])


def parts_of(length, seed):
    """What transformers takes: values, steps, keys, queries."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(length, HEADS, VALUE, generator=generator)
    step = torch.rand(length, HEADS, generator=generator)
    key, query = (torch.randn(length, GROUPS, KEY, generator=generator) for _ in range(2))
    return value, step, key, query


def inputs_of(parts):
    value, step, key, query = parts
    return SpaceInputs(query, key, value * step[..., None], step * RATES)


def packed(inputs):
    return SpaceInputs(*(torch.cat(values).requires_grad_(True) for values in zip(*inputs, strict=True)))


def spans_of(lengths):
    return list(pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist()))


def chunks_of(lengths):
    return SpanChunks(spans_of(lengths), CHUNK_TOKENS, torch.device("cpu"))


def transformers_scan(parts, state):
    """Its states are [V, K]."""
    value, step, key, query = (part[None] for part in parts)
    state = None if state is None else state.transpose(-1, -2)[None]
    out, after = mamba2_chunk_scan(
        value, step, RATES, key, query, chunk_size=64, initial_states=state, return_final_states=True
    )
    return out[0], after[0].transpose(-1, -2)


@pytest.mark.parametrize("begins", [True, False], ids=["from nothing", "from a state"])
def test_every_packed_sequence_gets_what_transformers_gives_it_alone(begins):
    parts = [parts_of(length, seed) for seed, length in enumerate(LENGTHS)]
    inputs = packed([inputs_of(part) for part in parts])
    states = torch.randn(len(LENGTHS), HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))

    out, after = StateSpace().over_spans(inputs, chunks_of(LENGTHS), None if begins else states, keeps=True)

    for number, (part, (start, end)) in enumerate(zip(parts, spans_of(LENGTHS), strict=True)):
        expected, state = transformers_scan(part, None if begins else states[number])
        torch.testing.assert_close(out[start:end], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[number], state, atol=1e-5, rtol=1e-4)


def test_a_token_more_for_each_sequence_is_what_the_chunk_would_have_given():
    whole = [parts_of(length + 1, seed) for seed, length in enumerate(LENGTHS)]
    head = packed([inputs_of([values[:-1] for values in part]) for part in whole])
    last = packed([inputs_of([values[-1:] for values in part]) for part in whole])
    _, before = StateSpace().over_spans(head, chunks_of(LENGTHS), None, keeps=True)

    out, after = StateSpace().over_tokens(last, before)

    for number, part in enumerate(whole):
        expected, state = transformers_scan(part, None)
        torch.testing.assert_close(out[number], expected[-1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[number], state, atol=1e-5, rtol=1e-4)


def test_a_prompt_cut_between_chunks_leaves_the_same_bits():
    inputs = inputs_of(parts_of(200, 0))
    whole, end = StateSpace().over_spans(inputs, chunks_of([200]), None, keeps=True)
    first, rest = (SpaceInputs(*(values[part] for values in inputs)) for part in (slice(128), slice(128, 200)))

    head, state = StateSpace().over_spans(first, chunks_of([128]), None, keeps=True)
    tail, after = StateSpace().over_spans(rest, chunks_of([72]), state, keeps=True)

    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(after, end)
