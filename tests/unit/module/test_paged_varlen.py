"""A kernel that reads pages is tried before it is trusted, in each way that torch's releases may take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from harness.paged_kernel import PagedFunction
from harness.varlen_kernel import VarlenKernel
from twinkle.module import paged_varlen
from twinkle.module import tried as trying
from twinkle.module.paged_varlen import PagedKernel
from twinkle.module.scaled_attention import AttentionForm

SIZE = 16


class LikeFlashAttention2(PagedFunction):
    """It cannot be told of splits, and wants to know where keys end."""

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, *rest, **options):  # type: ignore[no-untyped-def]
        if "num_splits" in options:
            raise RuntimeError("num_splits requires FA3")
        if cu_seq_k is None:
            raise RuntimeError("must be both set or both not set")
        assert cu_seq_k.diff().tolist() == options["seqused_k"].tolist()
        return super().__call__(query, key, value, cu_seq_q, cu_seq_k, *rest, **options)


class LikeFlashAttention3(PagedFunction):
    """It wants to know nothing of the sort."""

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, *rest, **options):  # type: ignore[no-untyped-def]
        if cu_seq_k is not None:
            raise RuntimeError("If cu_seqlens_k is passed in, then page table is not supported")
        return super().__call__(query, key, value, cu_seq_q, cu_seq_k, *rest, **options)


class SeesTooFar(PagedFunction):
    """It sees one position behind the end."""

    def __call__(self, *sides, seqused_k, **options):  # type: ignore[no-untyped-def]
        return super().__call__(*sides[:-1], sides[-1] + 1, seqused_k=seqused_k + 1, **options)


class TakesPagesInOrder(PagedFunction):
    """It does not look into the table."""

    def __call__(self, *sides, block_table, **options):  # type: ignore[no-untyped-def]
        return super().__call__(*sides, block_table=block_table.sort().values, **options)


def tried(function: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch, **asked: bool) -> PagedKernel | None:
    monkeypatch.setattr(paged_varlen, "torch_kernel", lambda device_type, dtype: function)
    monkeypatch.setattr(trying, "is_quick", lambda device_type, dtype: True)
    asked = {"is_shared": True, "is_windowed": False, **asked}
    found: PagedKernel | None = paged_varlen._tried.__wrapped__("cpu", torch.float32, SIZE, **asked)
    return found


@pytest.mark.parametrize("is_windowed", [True, False])
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(("function", "wants_ends"), [(LikeFlashAttention2, True), (LikeFlashAttention3, False)])
def test_it_is_told_what_it_wants_to_know(
    function: type[PagedFunction], wants_ends: bool, is_shared: bool, is_windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tried(function(), monkeypatch, is_shared=is_shared, is_windowed=is_windowed)
    assert kernel is not None
    assert kernel.wants_ends == wants_ends


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (SeesTooFar, "its values are not those of attention sequence by sequence"),
        (TakesPagesInOrder, "its values are not those of attention sequence by sequence"),
        (VarlenKernel, "unexpected keyword argument"),
    ],
)
def test_what_is_wrong_or_unknown_is_said_once_with_its_reason(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with capture_logs() as said:
        assert tried(function(), monkeypatch) is None
    (line,) = said
    assert line["event"] == "device.no_paged_attention_kernel"
    assert any(reason in each for each in line["reasons"])  # others of the ways to call it are unknown to it


@pytest.mark.parametrize(
    "form",
    [AttentionForm(1.0, cap=30.0), AttentionForm(1.0, sinks=torch.zeros(4)), AttentionForm(1.0, chunk=8)],
    ids=["cap", "sinks", "chunks"],
)
def test_what_no_kernel_knows_is_not_asked_of_it(form: AttentionForm) -> None:
    query = torch.zeros(1, 4, 1, SIZE)
    assert paged_varlen.paged_kernel_for(query, query, form) is None


def test_a_cpu_has_no_such_kernel() -> None:
    query = torch.zeros(1, 4, 1, SIZE, dtype=torch.bfloat16)
    assert paged_varlen.paged_kernel_for(query, query, AttentionForm(1.0)) is None
