"""Attention over packed sequences: the bits of plain slices, at a cost that does not grow with their number."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from twinkle.module import scaled_attention
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.scaled_attention import AttentionForm

LENGTHS = {
    "one": [33],
    "single tokens": [1, 1, 1],
    "many short": [5] * 24,
    "mixed": [70, 1, 3, 128, 17, 2],
}
HEADS = {"all alike": (4, 4), "shared keys": (4, 2)}
SIZE = 16


def sliced(spans, query, key, value, *, scale, window):
    """What is right, written with slices."""
    attended = []
    for start, end in spans:
        step = end - start if window is None else window
        for first in range(start, end, step):
            last, first_key = min(first + step, end), max(start, first - step + 1)
            mask = None if first == start else AttentionForm(scale, window).mask(first, last, first_key, query.device)
            attended.append(
                functional.scaled_dot_product_attention(
                    query[:, :, first:last],
                    key[:, :, first_key:last],
                    value[:, :, first_key:last],
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                ).transpose(1, 2)
            )
    return torch.cat(attended, dim=1)


def inputs_of(num_tokens, heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads[0], heads[1], heads[1])
    # As layers give them: heads lie inside of tokens.
    return [
        torch.randn(1, num_tokens, count, SIZE, generator=generator).transpose(1, 2).requires_grad_(True)
        for count in sizes
    ]


def spans_of(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return list(pairwise(ends))


@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_and_gradients_are_those_of_slices_bit_by_bit(lengths, heads, window):
    spans = spans_of(lengths)
    ours, theirs = inputs_of(sum(lengths), heads), inputs_of(sum(lengths), heads)

    attended = CausalSpans(spans)(0, *ours, form=AttentionForm(0.25, window))
    expected = sliced(spans, *theirs, scale=0.25, window=window)
    upstream = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(attended, ours, upstream)

    assert torch.equal(attended, expected)
    for found, right in zip(gradients, torch.autograd.grad(expected, theirs, upstream), strict=True):
        assert torch.equal(found, right)


FORMS = {
    "plain": AttentionForm(0.25),
    "windows": AttentionForm(0.25, window=4),
    "chunks": AttentionForm(0.25, chunk=4),
    "capped": AttentionForm(0.25, cap=5.0),
    "sinks": AttentionForm(0.25, sinks=torch.zeros(4)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_gradient_is_added_up_over_the_whole_row_for_each_sequence(form):
    inputs = inputs_of(12 * 11, HEADS["shared keys"])
    attended = CausalSpans(spans_of([5, 6] * 12))(0, *inputs, form=form)
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.autograd.grad(attended, inputs, torch.ones_like(attended))
    whole = [
        event.key
        for event in profile.key_averages(group_by_input_shape=True)
        if any(12 * 11 in shape for shape in event.input_shapes)
        and event.key in ("aten::zero_", "aten::add", "aten::add_")
    ]
    assert "aten::cat" in {event.key for event in profile.key_averages()}
    assert whole == []


def test_the_gradient_of_a_long_capped_sequence_is_not_added_up_over_all_queries_for_each_block():
    length = 3 * scaled_attention.QUERIES_PER_BLOCK
    inputs = inputs_of(length, HEADS["all alike"])
    attended = CausalSpans([(0, length)])(0, *inputs, form=FORMS["capped"])
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attended, inputs[:1], torch.ones_like(attended))
    assert "aten::slice_backward" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("lengths", "form", "num_calls"),
    [
        ([5] * 24, AttentionForm(0.25), 1),
        ([5] * 24, AttentionForm(0.25, window=5), 1),
        ([5, 5, 6, 6, 5], AttentionForm(0.25), 3),
        ([5] * 3, AttentionForm(0.25, window=4), 6),
        ([5] * 3, AttentionForm(0.25, chunk=4), 6),
        ([5] * 3, AttentionForm(0.25, sinks=torch.zeros(4)), 3),
    ],
)
def test_neighbours_of_one_length_are_attended_in_one_call_where_each_is_whole(lengths, form, num_calls):
    inputs = inputs_of(sum(lengths), HEADS["shared keys"])
    with torch.profiler.profile() as profile, torch.no_grad():
        attended = CausalSpans(spans_of(lengths))(0, *inputs, form=form)
    calls = {event.key: event.count for event in profile.key_averages()}

    assert calls["aten::scaled_dot_product_attention"] == num_calls
    assert attended.shape == (1, sum(lengths), 4, SIZE)


def test_spans_that_leave_tokens_out_are_an_error():
    inputs = inputs_of(9, HEADS["all alike"])
    with pytest.raises(RuntimeError, match="split"):
        CausalSpans([(0, 5)])(0, *inputs, form=AttentionForm(0.25))
