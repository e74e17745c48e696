"""Every form of attention against its equation, with kernels and where a device has none."""

import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional

from twinkle.module import scaled_attention
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.scaled_attention import AttentionForm, has_kernel

HEADS, GROUPS, SIZE, SCALE = 4, 2, 16, 0.3
LENGTH = scaled_attention.QUERIES_PER_BLOCK + 44
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
FORMS = {
    "plain": AttentionForm(SCALE),
    "window": AttentionForm(SCALE, window=37),
    "chunks": AttentionForm(SCALE, chunk=64),
    "cap": AttentionForm(SCALE, cap=1.5),
    "cap and window": AttentionForm(SCALE, cap=1.5, window=100),
    "sinks": AttentionForm(SCALE, sinks=SINKS),
    "sinks and window": AttentionForm(SCALE, sinks=SINKS, window=37),
}


def by_equation(query, key, value, form):
    key, value = (matrix.repeat_interleave(HEADS // GROUPS, dim=1) for matrix in (key, value))
    scores = query @ key.transpose(2, 3) * form.scale
    if form.cap is not None:
        scores = form.cap * torch.tanh(scores / form.cap)
    here, there = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = there <= here
    if form.window is not None:
        seen &= there > here - form.window
    if form.chunk is not None:
        seen &= there // form.chunk == here // form.chunk
    shares = scores.masked_fill(~seen, -torch.inf).exp()
    total = shares.sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + form.sinks.view(1, HEADS, 1, 1).exp()
    return (shares / total @ value).transpose(1, 2)


@pytest.fixture(params=["kernels", "no kernels"])
def kernels(request, monkeypatch):
    has_kernel.cache_clear()
    if request.param == "no kernels":

        def refuse(*args, **settings):
            raise NotImplementedError("no kernel of this device")

        monkeypatch.setattr(functional, "scaled_dot_product_attention", refuse)
    yield request.param
    has_kernel.cache_clear()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_are_those_of_the_equation(form, kernels):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, heads, LENGTH, SIZE, generator=generator).requires_grad_() for heads in (HEADS, GROUPS, GROUPS)
    ]
    upstream = torch.randn(1, LENGTH, HEADS, SIZE, generator=generator)

    found = CausalSpans([(0, LENGTH)])(0, *inputs, form=form)

    right = by_equation(*inputs, form)
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    gradients = torch.autograd.grad(found, inputs, upstream)
    for ours, expected in zip(gradients, torch.autograd.grad(right, inputs, upstream), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3)


def test_a_device_without_a_kernel_says_so_once(kernels):
    inputs = [torch.ones(1, heads, 3, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    with capture_logs() as said:
        for _ in range(2):
            CausalSpans([(0, 3)])(0, *inputs, form=FORMS["plain"])

    expected = ["device.no_attention_kernel"] if kernels == "no kernels" else []
    assert [line["event"] for line in said] == expected
