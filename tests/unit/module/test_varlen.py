"""One attention call for all sequences: what it is told, by a stand-in for torch's kernel, which only GPUs have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from harness.varlen_kernel import VarlenKernel
from twinkle.module import packed_attention, varlen
from twinkle.module.packed_attention import CausalSpans
from twinkle.module.scaled_attention import AttentionForm

HEADS, SIZE = (4, 2), 16
LENGTHS = [70, 1, 3, 128, 17]


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, sum(LENGTHS), heads, SIZE, generator=generator).transpose(1, 2)
        for heads in (HEADS[0], HEADS[1], HEADS[1])
    ]


def spans() -> Sequence[tuple[int, int]]:
    return list(pairwise(torch.tensor([0, *LENGTHS]).cumsum(0).tolist()))


@pytest.mark.parametrize(
    "form", [AttentionForm(0.25), AttentionForm(0.25, window=16), AttentionForm(0.25, chunk=32)], ids=str
)
def test_one_call_gives_what_a_call_for_each_sequence_gives(
    form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = CausalSpans(spans())(0, *inputs(), form=form)
    kernel = VarlenKernel()
    monkeypatch.setattr(packed_attention, "kernel_for", lambda query, key, form: kernel)

    attention = CausalSpans(spans())
    found = [attention(layer, *inputs(), form=form) for layer in range(2)]

    assert kernel.num_calls == 2
    for attended in found:
        torch.testing.assert_close(attended, expected)


def test_where_sequences_end_is_told_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    send = varlen.send
    monkeypatch.setattr(varlen, "send", lambda *args: (sent.append(args), send(*args))[1])
    monkeypatch.setattr(packed_attention, "kernel_for", lambda query, key, form: VarlenKernel())
    attention = CausalSpans(spans())
    for layer in range(3):
        attention(layer, *inputs(), form=AttentionForm(0.25, window=16 if layer % 2 else None))
    assert len(sent) == 1


@pytest.mark.parametrize("form", [AttentionForm(1.0, cap=30.0), AttentionForm(1.0, sinks=torch.zeros(4))], ids=str)
def test_what_no_kernel_knows_is_not_asked_of_it(form: AttentionForm) -> None:
    query, key, _ = inputs()
    assert varlen.kernel_for(query, key, form) is None


def test_a_cpu_has_no_such_kernel() -> None:
    query, key, _ = (each.bfloat16() for each in inputs())
    assert varlen.kernel_for(query, key, AttentionForm(1.0)) is None


@pytest.mark.parametrize("is_windowed", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_kernel_is_tried_before_it_is_trusted(is_shared: bool, is_windowed: bool) -> None:
    class Mistaken(VarlenKernel):
        """Takes the values from behind."""

        def __call__(self, query, key, value, *rest, window_size, **options):  # type: ignore[no-untyped-def]
            return super().__call__(query, key, value.flip(0), *rest, window_size=window_size, **options)

    asked = (torch.device("cpu"), torch.float32, SIZE, is_shared, is_windowed)
    assert varlen._failure(VarlenKernel(), *asked) is None
    assert "sequence by sequence" in str(varlen._failure(Mistaken(), *asked))


@pytest.mark.parametrize("is_told", [True, False])
def test_a_kernel_is_told_of_splits_what_it_can_be_told(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention 2 says that only another can be told."""
    told: list[int | None] = []

    class Own(VarlenKernel):
        def __call__(self, *sides, num_splits=None, **options):  # type: ignore[no-untyped-def]
            if num_splits is not None and not is_told:
                raise RuntimeError("num_splits requires FA3")
            told.append(num_splits)
            return super().__call__(*sides, **options)

    monkeypatch.setattr(varlen, "torch_kernel", lambda device_type, dtype: Own())
    kernel = varlen._tried.__wrapped__("cpu", torch.float32, SIZE, True, False)

    assert kernel is not None
    assert set(told) == ({1} if is_told else {None})


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_release_that_has_no_word_for_shared_heads_is_called_without(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11, whose kernel sees how many heads there are."""

    def older(query, key, value, *rest, scale, window_size):  # type: ignore[no-untyped-def]
        shares = query.shape[1] != key.shape[1]
        return VarlenKernel()(query, key, value, *rest, scale=scale, window_size=window_size, enable_gqa=shares)

    monkeypatch.setattr(varlen, "torch_kernel", lambda device_type, dtype: older)
    assert varlen._tried.__wrapped__("cpu", torch.float32, SIZE, is_shared, True) is not None
