"""Attention over packed sequences: the bits of plain slices, at a cost that does not grow with their number."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

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


def test_no_gradient_is_added_up_over_the_whole_row_for_each_sequence():
    inputs = inputs_of(24 * 5, HEADS["shared keys"])
    attended = CausalSpans(spans_of([5] * 24))(0, *inputs, form=AttentionForm(0.25))
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attended, inputs, torch.ones_like(attended))
    operations = {event.key for event in profile.key_averages()}
    assert "aten::cat" in operations
    assert not {"aten::slice_backward", "aten::add", "aten::add_"} & operations


def test_spans_that_leave_tokens_out_are_an_error():
    inputs = inputs_of(9, HEADS["all alike"])
    with pytest.raises(RuntimeError, match="split"):
        CausalSpans([(0, 5)])(0, *inputs, form=AttentionForm(0.25))
