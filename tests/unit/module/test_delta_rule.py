"""The gated delta rule over packed sequences: transformers' numbers, one sequence's bits in any company, any kernel."""

from itertools import pairwise

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from twinkle.model.fused.determinism import prepare_environment
from twinkle.module.delta_kernels import FlashDeltaRule
from twinkle.module.delta_rule import DeltaInputs, PlainDeltaRule
from twinkle.module.packed_states import LayerState, PackedStates, SpanChunks, Taps
from twinkle.module.recurrence import CHUNK_TOKENS

prepare_environment()

LENGTHS = (5, 130, 1, 64, 200, 3)
HEADS, KEY, VALUE = 3, 16, 8
CPU = torch.device("cpu")


def inputs_of(length, seed):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(length, HEADS, size, generator=generator) for size in (KEY, KEY, VALUE))
    decay, beta = (torch.randn(length, HEADS, generator=generator) for _ in range(2))
    return DeltaInputs(query, key, value, -decay.abs(), beta.sigmoid())


def packed(parts):
    return DeltaInputs(*(torch.cat(values).requires_grad_(True) for values in zip(*parts, strict=True)))


def spans_of(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return list(pairwise(ends))


def chunks_of(lengths):
    return SpanChunks(spans_of(lengths), CHUNK_TOKENS, CPU)


def transformers_rule(inputs, state=None):
    query, key, value, decay, beta = (values.detach()[None] for values in inputs)
    out, after = torch_chunk_gated_delta_rule(
        query,
        key,
        value,
        decay,
        beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], after


def chunk_twin(*, q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    """flash-linear-attention's ``chunk_gated_delta_rule``, as it is documented, by transformers' reference."""
    assert q.shape[0] == 1 and use_qk_l2norm_in_kernel
    outputs, states = [], []
    for number, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        out, state = torch_chunk_gated_delta_rule(
            *(values[:, start:end] for values in (q, k, v, g, beta)),
            initial_state=None if initial_state is None else initial_state[number : number + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(out)
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states) if output_final_state else None


def recurrent_twin(*, q, k, v, g, beta, **settings):
    """Its ``fused_recurrent_gated_delta_rule``."""
    return torch_recurrent_gated_delta_rule(q, k, v, g, beta, **settings)


RULES = {"plain": PlainDeltaRule(), "kernels": FlashDeltaRule(chunk_twin, recurrent_twin)}


@pytest.mark.parametrize("rule", RULES)
def test_every_packed_sequence_gets_what_transformers_gives_it_alone(rule):
    parts = [inputs_of(length, seed) for seed, length in enumerate(LENGTHS)]
    inputs = packed(parts)
    states = torch.randn(len(LENGTHS), HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))

    for before in (None, states):
        out, after = RULES[rule].over_spans(inputs, chunks_of(LENGTHS), before, keeps=True)

        for number, (part, (start, end)) in enumerate(zip(parts, spans_of(LENGTHS), strict=True)):
            expected, state = transformers_rule(part, None if before is None else before[number : number + 1])
            torch.testing.assert_close(out[start:end], expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(after[number], state[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_more_for_each_sequence_is_what_the_chunk_would_have_given(rule):
    whole = [inputs_of(length + 1, seed) for seed, length in enumerate(LENGTHS)]
    head = packed([DeltaInputs(*(values[:-1] for values in part)) for part in whole])
    last = packed([DeltaInputs(*(values[-1:] for values in part)) for part in whole])
    _, before = RULES[rule].over_spans(head, chunks_of(LENGTHS), None, keeps=True)

    out, after = RULES[rule].over_tokens(last, before)

    for number, part in enumerate(whole):
        expected, state = transformers_rule(part)
        torch.testing.assert_close(out[number], expected[-1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[number], state[0], atol=1e-5, rtol=1e-4)


def gradients(rule, inputs, lengths):
    out, _ = rule.over_spans(inputs, chunks_of(lengths), None, keeps=False)
    weights = torch.cat([torch.linspace(-1, 1, length) for length in lengths])
    return out, torch.autograd.grad((out * weights[:, None, None]).sum(), list(inputs))


def test_gradients_of_both_ways_are_the_same():
    parts = [inputs_of(length, seed) for seed, length in enumerate(LENGTHS)]
    _, plain = gradients(RULES["plain"], packed(parts), LENGTHS)
    _, by_kernels = gradients(RULES["kernels"], packed(parts), LENGTHS)
    for ours, theirs in zip(plain, by_kernels, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=1e-3)


def test_a_prompt_cut_between_chunks_leaves_the_same_bits():
    inputs = inputs_of(200, 0)
    whole, end = PlainDeltaRule().over_spans(inputs, chunks_of([200]), None, keeps=True)
    first, rest = (DeltaInputs(*(values[part] for values in inputs)) for part in (slice(128), slice(128, 200)))

    head, state = PlainDeltaRule().over_spans(first, chunks_of([128]), None, keeps=True)
    tail, after = PlainDeltaRule().over_spans(rest, chunks_of([72]), state, keeps=True)

    assert torch.equal(torch.cat((head, tail)), whole)
    assert torch.equal(after, end)


def convolved(x, taps):
    padded = torch.nn.functional.pad(x.T[None], (taps.shape[1] - 1, 0))
    return torch.nn.functional.conv1d(padded, taps[:, None], groups=len(taps))[0].T


def test_a_convolution_begins_anew_with_every_sequence_and_its_gradients_stay_within():
    torch.manual_seed(0)
    taps, x = torch.randn(6, 4), torch.randn(sum(LENGTHS), 6, requires_grad=True)
    states = PackedStates(spans_of(LENGTHS))
    expected = torch.cat([convolved(part, taps) for part in x.split(LENGTHS)])

    found = Taps(taps, states, [None] * len(LENGTHS))(x)

    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_a_convolution_goes_on_from_the_tokens_before_a_piece():
    torch.manual_seed(0)
    taps, x = torch.randn(6, 4), torch.randn(12, 6)
    state = torch.zeros(3, 3)
    cuts = [(0, 2), (2, 3), (3, 4), (4, 12)]
    past, outputs = None, []
    for start, end in cuts:
        # Beside another sequence, which begins.
        piece = torch.cat((torch.randn(5, 6), x[start:end]))
        runs = Taps(taps, PackedStates([(0, 5), (5, 5 + end - start)]), [None, past])
        outputs.append(runs(piece)[5:])
        past = LayerState(runs.after(piece)[1], state)

    assert torch.equal(past.past, x[-3:])
    torch.testing.assert_close(torch.cat(outputs), convolved(x, taps))
