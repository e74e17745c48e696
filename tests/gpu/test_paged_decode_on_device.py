"""Single queries over pages by our kernels, which only GPUs run; on a CPU a stand-in for them is tested."""

from __future__ import annotations

import itertools

import pytest
import torch

from twinkle.module.paged_decode import HEAD_SIZES, MOST_SHARING, SPLIT, DecodeKernel, decode_kernel_for, relative_error
from twinkle.module.paged_varlen import PAGE_TOKENS
from twinkle.module.scaled_attention import AttentionForm

pytestmark = pytest.mark.gpu

HEADS, GROUPS, SIZE = 8, 2, 128
LENGTHS = (1, PAGE_TOKENS, 0, 3 * PAGE_TOKENS + 17, 40, 9 * SPLIT + 1)
NAMES = ("is_windowed", "is_capped", "has_sinks")
ASKED = [dict(zip(NAMES, each, strict=True)) for each in itertools.product((False, True), repeat=3)]
FORMS = {
    "plain": AttentionForm(0.1),
    "window": AttentionForm(0.1, window=SPLIT + 2),
    "cap": AttentionForm(0.1, cap=2.0),
    "sinks": AttentionForm(0.1, sinks=torch.tensor([3.0, -1.0, 0.0, 2.0, 5.0, -30.0, 1.0, 0.0])),
}


class OnDevice:
    """Queries, and keys and values in pages that lie backwards; what lies behind each end is ``behind``."""

    def __init__(self, *, behind: float, num_heads: int = HEADS) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        counts = [-(-length // PAGE_TOKENS) for length in LENGTHS]
        shape = (2, sum(counts) + 1, PAGE_TOKENS, GROUPS, SIZE)
        options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.queries = torch.randn(len(LENGTHS), num_heads, SIZE, **options)
        self.pool = torch.randn(shape, **options)
        self.pool[:, 0] = behind
        self.used = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
        self.table = torch.zeros(len(LENGTHS), 64, dtype=torch.int32, device="cuda")
        last = sum(counts)
        for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
            self.table[row, :count] = torch.arange(last, last - count, -1)
            last -= count
            if count:
                self.pool[:, last + 1, length - (count - 1) * PAGE_TOKENS :] = behind

    def attended(self, form: AttentionForm, rows: slice = slice(None), width: int | None = None) -> torch.Tensor:
        kernel = found_kernel(self.queries, form)
        used, table = self.used[rows], self.table[rows, :width]
        return kernel.attend(self.queries[rows], *self.pool.unbind(), used_S=used, table_SM=table, form=form)[0]


def found_kernel(queries: torch.Tensor, form: AttentionForm) -> DecodeKernel:
    keys = queries.new_empty(1, GROUPS, len(queries), SIZE)
    kernel = decode_kernel_for(queries.transpose(0, 1)[None], keys, form)
    assert kernel is not None
    return kernel


def on_device(form: AttentionForm) -> AttentionForm:
    sinks = None if form.sinks is None else form.sinks.to("cuda", torch.bfloat16)
    return AttentionForm(form.scale, form.window, cap=form.cap, sinks=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_values_are_those_of_attention_in_double_precision(head_size: int, dtype: torch.dtype) -> None:
    """In every form, with NaN behind the ends of sequences, and a row without keys."""
    kernels = found_kernel(torch.empty(1, HEADS, SIZE, dtype=dtype, device="cuda"), FORMS["plain"]).kernels
    errors = {
        f"{num_sharing} {asked}": relative_error(
            kernels, torch.device("cuda"), dtype, head_size=head_size, num_sharing=num_sharing, **asked
        )
        for asked in ASKED
        for num_sharing in (1, 3)
        if not (asked["is_capped"] and asked["has_sinks"])
    }
    print(head_size, dtype, "off by at most", max(errors.values()))
    assert {name: error for name, error in errors.items() if not error < 0.01} == {}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_sequence_gets_the_same_bits_alone_and_with_a_wider_table_and_sees_nothing_behind_its_end(
    form: AttentionForm,
) -> None:
    form = on_device(form)
    laid = OnDevice(behind=torch.nan)
    together = laid.attended(form)
    assert not together.isnan().any()
    assert not together[LENGTHS.index(0)].any()
    assert torch.equal(OnDevice(behind=0.0).attended(form), together)
    assert torch.equal(laid.attended(form, width=-(-max(LENGTHS) // PAGE_TOKENS)), together)
    for row, length in enumerate(LENGTHS):
        own = slice(row, row + 1)
        assert torch.equal(laid.attended(form, own), together[own])
        assert torch.equal(laid.attended(form, own, max(1, -(-length // PAGE_TOKENS))), together[own])


@pytest.mark.parametrize("sharing", [1, 16, 17, MOST_SHARING])
def test_many_heads_may_share_keys(sharing: int) -> None:
    """They give what each gives by itself: a head's keys are what counts."""
    laid = OnDevice(behind=torch.nan, num_heads=GROUPS * sharing)
    together = laid.attended(FORMS["plain"])
    queries = laid.queries
    for number in {0, sharing - 1}:
        laid.queries = queries[:, number::sharing].contiguous()
        alone = laid.attended(FORMS["plain"])
        assert (alone.float() - together[:, number::sharing].float()).norm() < 0.01 * alone.float().norm()


def test_nothing_is_compiled_anew_for_other_numbers_of_sequences_heads_and_pages() -> None:
    """Not by what was tried before the first use, either; a graph could not be captured meanwhile."""
    laid = OnDevice(behind=0.0)
    window = AttentionForm(0.1, window=SPLIT + 2)
    kernels = found_kernel(laid.queries, window).kernels

    def num_compiled() -> int:
        both = (kernels.attend_splits, kernels.combine_splits)
        return sum(len(kernels_of_device[0]) for each in both for kernels_of_device in each.device_caches.values())

    before = num_compiled()
    assert before >= 2
    for rows, width, num_heads, form in itertools.product(
        (1, 3, len(LENGTHS)),
        (19, 32, 64),
        (4, 16),
        (window, AttentionForm(1.0, window=1), AttentionForm(1.0, window=16)),
    ):
        laid.queries = torch.randn(len(LENGTHS), num_heads, SIZE, dtype=torch.bfloat16, device="cuda")
        laid.attended(form, slice(len(LENGTHS) - rows, None), width)
    assert num_compiled() == before


def test_a_graph_looks_at_lengths_and_pages_when_it_runs() -> None:
    laid = OnDevice(behind=torch.nan)
    form = on_device(FORMS["sinks"])
    eager = laid.attended(form).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = laid.attended(form)
    order = torch.arange(len(LENGTHS), device="cuda").flip(0)
    for each in (laid.used, laid.table, laid.queries):
        each.copy_(each[order].clone())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager[order])
