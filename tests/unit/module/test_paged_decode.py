"""Single queries over pages by our kernels, in whose place a stand-in reads and writes on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from harness.launches import Launches, UncomputedKernels
from harness.paged_decode_kernels import DecodeKernels, decode_kernel
from twinkle.module import paged_decode
from twinkle.module import tried as trying
from twinkle.module.paged_decode import SPLIT, DecodeKernel, decode_kernel_for, relative_error
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.tried import TOLERANCE

CPU = torch.device("cpu")
GROUPS, SIZE, PAGE = 2, 16, 256
LENGTHS = (1, PAGE, 0, 3 * PAGE + 17, 40, 2 * SPLIT, 2 * SPLIT + 1)
SINKS = torch.tensor([3.0, -1.0, 0.0, 2.0, 5.0, -30.0])
FORMS = {
    "plain": AttentionForm(0.25),
    "window of one": AttentionForm(0.25, window=1),
    "window": AttentionForm(0.25, window=16),
    "window over pages and splits": AttentionForm(0.25, window=PAGE + 3),
    "window of more than a split": AttentionForm(0.25, window=SPLIT + 2),
    "cap": AttentionForm(0.25, cap=2.0),
    "cap and window": AttentionForm(0.25, cap=2.0, window=PAGE),
    "sinks": AttentionForm(0.25, sinks=SINKS),
    "sinks and window": AttentionForm(0.25, sinks=SINKS, window=100),
}


class Laid:
    """Queries, and keys and values in pages that lie backwards; NaN lies behind each end, and in page 0."""

    def __init__(self, *, num_heads: int = 6, page: int = PAGE, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // page) for length in LENGTHS]
        self.queries = 2 * torch.randn(len(LENGTHS), num_heads, SIZE, generator=generator).to(dtype)
        self.pool = torch.randn(2, sum(counts) + 1, page, GROUPS, SIZE, generator=generator).to(dtype)
        self.pool[:, 0] = torch.nan
        self.table = torch.zeros(len(LENGTHS), max(counts), dtype=torch.int32)
        self.used = torch.tensor(LENGTHS, dtype=torch.int32)
        last = sum(counts)
        for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
            self.table[row, :count] = torch.arange(last, last - count, -1)
            last -= count
            if count:
                self.pool[:, self.table[row, count - 1], length - (count - 1) * page :] = torch.nan

    def attended(self, form: AttentionForm, kernel: DecodeKernel | None = None, **changed: Any) -> torch.Tensor:
        kernel = kernel or decode_kernel()
        given = {"used_S": self.used, "table_SM": self.table, "query_SHD": self.queries, **changed}
        return kernel.attend(given.pop("query_SHD"), *self.pool.unbind(), **given, form=form)[0]

    def expected(self, form: AttentionForm) -> torch.Tensor:
        """Of each sequence by itself, of its keys side by side; zeros where there are none."""
        exact = AttentionForm(form.scale, cap=form.cap, sinks=None if form.sinks is None else form.sinks.double())
        rows = []
        for query, pages, length in zip(self.queries, self.table.tolist(), LENGTHS, strict=True):
            lying = self.pool[:, pages].flatten(1, 2)[:, form.first_key(length - 1) : length].double()
            keys, values = lying.transpose(1, 2)[:, None]
            nothing = torch.zeros(query.shape, dtype=torch.float64)
            rows.append(attend(query[None, :, None].double(), keys, values, form=exact)[0, 0] if length else nothing)
        return torch.stack(rows)


@pytest.mark.parametrize("page", [PAGE, 64, 16])
@pytest.mark.parametrize("num_heads", [6, 2])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_sequence_is_attended_as_by_itself(form: AttentionForm, num_heads: int, page: int) -> None:
    laid = Laid(num_heads=num_heads, page=page)
    if form.sinks is not None:
        form = AttentionForm(form.scale, form.window, sinks=form.sinks[-num_heads:])
    found = laid.attended(form)
    torch.testing.assert_close(found.double(), laid.expected(form), atol=1e-5, rtol=1e-4)
    assert not found[LENGTHS.index(0)].any()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_sequence_gets_the_same_bits_alone_and_with_a_wider_table(form: AttentionForm) -> None:
    laid = Laid(dtype=torch.bfloat16)
    together = laid.attended(form)
    # As of a table that is kept from step to step: rows of it lie further apart, and what follows is anything.
    wide = torch.full((len(LENGTHS), 40), 12345, dtype=torch.int32)
    wide[:, : laid.table.shape[1]] = laid.table
    assert torch.equal(laid.attended(form, table_SM=wide), together)
    assert torch.equal(laid.attended(form, table_SM=wide[:, : laid.table.shape[1] + 3]), together)
    for row, length in enumerate(LENGTHS):
        own = slice(row, row + 1)
        width = max(1, -(-length // PAGE))
        alone = laid.attended(
            form, query_SHD=laid.queries[own], used_S=laid.used[own], table_SM=laid.table[own, :width]
        )
        assert torch.equal(alone, together[own])


def test_queries_may_lie_head_by_head_and_none_are_none() -> None:
    laid = Laid()
    by_head = laid.queries.transpose(0, 1).contiguous().transpose(0, 1)
    form = FORMS["plain"]
    assert torch.equal(laid.attended(form, query_SHD=by_head), laid.attended(form))
    kernel = decode_kernel()
    none = {"query_SHD": laid.queries[:0], "used_S": laid.used[:0], "table_SM": laid.table[:0]}
    assert laid.attended(form, kernel, **none).shape == (0, 6, SIZE)
    assert kernel.kernels.attend_splits.num_calls == kernel.kernels.combine_splits.num_calls == 0


def test_lengths_and_pages_are_looked_at_when_it_runs() -> None:
    """As a graph that was captured before runs again: the same tensors with other numbers in them."""
    laid = Laid()
    form = FORMS["sinks"]
    first = laid.attended(form)
    order = torch.arange(len(LENGTHS)).flip(0)
    for each in (laid.used, laid.table, laid.queries):
        each.copy_(each[order].clone())
    assert torch.equal(laid.attended(form), first[order])


def test_two_launches_are_all_that_is_done_and_no_value_is_read() -> None:
    ours: Counter[str] = Counter()
    kernel = DecodeKernel(UncomputedKernels(ours, ("attend_splits", "combine_splits")))
    with torch.device("meta"):
        query, pool = torch.empty(3, 4, SIZE), torch.empty(2, 9, PAGE, GROUPS, SIZE)
        used, table = torch.empty(3, dtype=torch.int32), torch.empty(3, 5, dtype=torch.int32)
        form = AttentionForm(1.0, window=8, sinks=torch.empty(4))
    with Launches(ours) as launches:
        found = kernel.attend(query, *pool.unbind(), used_S=used, table_SM=table, form=form)
    assert found.shape == (1, 3, 4, SIZE)
    assert launches.of == {"ours.attend_splits": 1, "ours.combine_splits": 1}


@pytest.mark.parametrize("window", [1, 2, SPLIT - 1, SPLIT, SPLIT + 1, SPLIT + 2, 2 * SPLIT + 1])
def test_there_are_as_many_splits_as_a_window_may_touch(window: int) -> None:
    touched = max((end - 1) // SPLIT - max(0, end - window) // SPLIT + 1 for end in range(1, 5 * SPLIT))
    assert paged_decode._num_splits(5 * SPLIT, window) == touched
    assert paged_decode._num_splits(SPLIT, window) == 1


def test_what_it_cannot_do_is_said() -> None:
    laid = Laid()
    with pytest.raises(NotImplementedError, match="chunks"):
        laid.attended(AttentionForm(0.25, chunk=8))
    laid.pool = laid.pool[:, :, :250].contiguous()
    with pytest.raises(ValueError, match="pages of 250 positions: a multiple of 16"):
        laid.attended(FORMS["plain"])
    laid.pool = Laid().pool[:, :, :240]
    with pytest.raises(ValueError, match="side by side"):
        laid.attended(FORMS["plain"])


def sees_one_too_many(right: Callable[..., None]) -> Callable[..., None]:
    return lambda grid, *given, **options: right(grid, *given[:6], given[6] + 1, *given[7:], **options)


def takes_pages_in_order(right: Callable[..., None]) -> Callable[..., None]:
    return lambda grid, *given, **options: right(grid, *given[:7], given[7].sort().values, *given[8:], **options)


def shares_heads_by_turns(right: Callable[..., None]) -> Callable[..., None]:
    def run(grid: Any, queries: torch.Tensor, *given: Any, **options: Any) -> None:
        by_turns = queries.unflatten(1, (-1, GROUPS)).transpose(1, 2).flatten(1, 2).contiguous()
        right(grid, by_turns, *given, **options)

    return run


def sees_one_less_of_the_window(right: Callable[..., None]) -> Callable[..., None]:
    return lambda grid, *given, **options: right(grid, *given[:-1], given[-1] - 1, **options)


def knows_no(option: str) -> Callable[..., Callable[..., None]]:
    return lambda right: lambda grid, *given, **options: right(grid, *given, **{**options, option: False})


def leaves_the_second_split_out(right: Callable[..., None]) -> Callable[..., None]:
    def run(grid: Any, attended: Any, parts: Any, maxima: torch.Tensor, *given: Any, **options: Any) -> None:
        maxima[:, :, 1:2] = maxima[:, :, 1:2].clamp(max=-1000)
        right(grid, attended, parts, maxima, *given, **options)

    return run


@pytest.mark.parametrize(
    ("kernel", "broken", "asked"),
    [
        ("attend_splits", sees_one_too_many, {}),
        ("attend_splits", takes_pages_in_order, {}),
        ("attend_splits", shares_heads_by_turns, {}),
        ("attend_splits", sees_one_less_of_the_window, {"is_windowed": True}),
        ("attend_splits", knows_no("IS_CAPPED"), {"is_capped": True}),
        ("combine_splits", knows_no("HAS_SINKS"), {"has_sinks": True}),
        ("combine_splits", leaves_the_second_split_out, {}),
        ("combine_splits", leaves_the_second_split_out, {"is_windowed": True}),
    ],
)
def test_wrong_kernels_are_told_from_right_ones(kernel: str, broken: Any, asked: dict[str, bool]) -> None:
    kernels = DecodeKernels()
    assert relative_error(kernels, CPU, torch.float32, **asked) < 1e-6
    getattr(kernels, kernel)._run = broken(getattr(kernels, kernel)._run)
    assert not relative_error(kernels, CPU, torch.float32, **asked) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [{}, {"is_windowed": True}, {"is_capped": True}, {"has_sinks": True}], ids=str)
@pytest.mark.parametrize("num_sharing", [1, 3, 17])
def test_right_ones_are_right_enough_in_half_precision(
    num_sharing: int, asked: dict[str, bool], dtype: torch.dtype
) -> None:
    assert relative_error(DecodeKernels(), CPU, dtype, num_sharing=num_sharing, **asked) < TOLERANCE / 2


def test_it_is_tried_once_for_what_is_asked_and_said_once_if_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = DecodeKernels()
    monkeypatch.setattr(trying, "is_quick", lambda device_type, dtype: True)
    monkeypatch.setattr(trying, "find_spec", lambda name: object())
    monkeypatch.setattr(trying, "import_module", lambda name: SimpleNamespace(**vars(kernels)))
    paged_decode._tried.cache_clear()
    query, key = torch.zeros(1, 6, 1, 32), torch.zeros(1, 2, 1, 32)
    with capture_logs() as said:
        found = decode_kernel_for(query, key, AttentionForm(1.0, window=7))
        assert found is not None and found.kernels.attend_splits is kernels.attend_splits
        assert decode_kernel_for(query, key, AttentionForm(2.0, window=70)) is found
        assert decode_kernel_for(query.new_zeros(1, 24, 1, 32), key, AttentionForm(2.0, window=7)) is found
        assert kernels.attend_splits.num_calls == 1
        # What has more rows is compiled anew.
        assert decode_kernel_for(query.new_zeros(1, 34, 1, 32), key, AttentionForm(2.0, window=70)) is not None
        assert kernels.attend_splits.num_calls == 2
        assert said == []
        kernels.attend_splits._run = takes_pages_in_order(kernels.attend_splits._run)
        for _ in range(2):
            assert decode_kernel_for(query, key, AttentionForm(1.0)) is None
    paged_decode._tried.cache_clear()
    (line,) = said
    assert line["event"] == "device.no_paged_decode_kernel"
    assert (line["head_size"], line["num_sharing"], line["is_windowed"]) == (32, 3, False)


@pytest.mark.parametrize(
    ("form", "num_heads", "size"),
    [
        (AttentionForm(1.0, chunk=8), 4, 64),
        (AttentionForm(1.0, cap=2.0, sinks=torch.zeros(4)), 4, 64),
        (AttentionForm(1.0), 4, 96),
        (AttentionForm(1.0), 4, 8),
        (AttentionForm(1.0), 4, 512),
        (AttentionForm(1.0), 130, 64),
    ],
    ids=["chunks", "cap and sinks", "no power of two", "too small", "too large", "too many heads of one"],
)
def test_what_it_does_not_know_is_not_asked_of_it(
    form: AttentionForm, num_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "_tried", lambda *asked: decode_kernel())
    key = torch.zeros(1, 2, 1, size)
    assert decode_kernel_for(torch.zeros(1, num_heads, 1, size), key, form) is None
    key = torch.zeros(1, 2, 1, 64)
    assert decode_kernel_for(torch.zeros(1, 4, 1, 64), key, AttentionForm(1.0, window=3)) is not None


def test_a_cpu_has_no_such_kernel() -> None:
    query = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    assert decode_kernel_for(query, query, AttentionForm(1.0)) is None
