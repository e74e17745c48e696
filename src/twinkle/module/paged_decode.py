"""Attention of the single query that each sequence decodes, over keys and values in pages, by kernels of our own.

They know caps and sinks, which torch's (``twinkle.module.paged_varlen``) do not, and need no number of the host's that
depends on lengths: what they are given may be captured in a graph, and lengths and pages be changed in place.

Shapes: H query heads, G key/value heads, S sequences, M pages in a row of the table, N pages of the pool, P positions
of a page, K splits of the keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any

import torch

from twinkle.module.paged_varlen import PAGE_TOKENS
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.tried import own_kernels

MODULE = "twinkle.module.paged_decode_kernels"
SPLIT = 512
"""Keys of a program, counted from a sequence's first."""
BLOCK = 64
"""Keys at a time at most; a page has a whole number of blocks."""
FEWEST_KEYS = 16
"""In a block, and so in a page; a product has as many rows at least."""
SPLITS = 16
"""Combined at a time."""
HEAD_SIZES = (16, 32, 64, 128, 256)
MOST_SHARING = 64
"""Query heads of a key head: all of them are rows of one product."""
LENGTHS = (1, 0, SPLIT + BLOCK + 5, 2 * SPLIT + 1, 40)
"""Of what is tried: a row without keys among them, and more than a split."""
TRIED_WINDOW = PAGE_TOKENS + 3


@dataclass(frozen=True)
class DecodeKernel:
    """What ``twinkle.module.paged_decode_kernels`` has."""

    kernels: Any

    def attend(
        self,
        query_SHD: torch.Tensor,
        key_NPGD: torch.Tensor,
        value_NPGD: torch.Tensor,
        *,
        used_S: torch.Tensor,
        table_SM: torch.Tensor,
        form: AttentionForm,
    ) -> torch.Tensor:
        """The attended values [1, S, H, D]; never waits for the device, and takes memory by shapes alone.

        Args:
            query_SHD: The last of each sequence.
            key_NPGD: The pool, of pages of a multiple of 16 positions.
            value_NPGD: The same of values.
            used_S: In int32 how many keys each sequence has, its query's own included; zeros come of none.
            table_SM: In int32 the pages of each; of those behind its keys anything may be told.
            form: Without chunks.
        """
        num_sequences, num_heads, size = query_SHD.shape
        page_tokens, num_groups = key_NPGD.shape[1:3]
        if page_tokens % FEWEST_KEYS or not (key_NPGD.is_contiguous() and value_NPGD.is_contiguous()):
            raise ValueError(f"pages of {page_tokens} positions: a multiple of {FEWEST_KEYS} is wanted, side by side")
        if form.chunk is not None:
            raise NotImplementedError("decoding over pages with chunks")
        query_SHD = query_SHD.contiguous()
        num_splits = _num_splits(table_SM.shape[1] * page_tokens, form.window)
        attended_SHD = torch.empty_like(query_SHD)
        parts_SHKD = query_SHD.new_empty(num_sequences, num_heads, num_splits, size, dtype=torch.float32)
        maxima_SHK, sums_SHK = parts_SHKD.new_empty(2, num_sequences, num_heads, num_splits).unbind()
        window, cap = form.window or 0, float(form.cap or 0.0)
        if num_sequences:
            with torch.cuda.device_of(query_SHD):
                self.kernels.attend_splits[(num_sequences, num_groups, num_splits)](
                    query_SHD, key_NPGD, value_NPGD, parts_SHKD, maxima_SHK, sums_SHK, used_S, table_SM,
                    table_SM.stride(0), num_heads, num_groups, num_splits, form.scale, cap, window,
                    IS_CAPPED=form.cap is not None, IS_WINDOWED=form.window is not None,
                    ROWS=_num_rows(num_heads // num_groups), SIZE=size, PAGE=page_tokens,
                    SPLIT=SPLIT, BLOCK=gcd(BLOCK, page_tokens), num_stages=_num_stages(size),
                )  # fmt: skip
                self.kernels.combine_splits[(num_sequences, num_heads)](
                    attended_SHD, parts_SHKD, maxima_SHK, sums_SHK, used_S if form.sinks is None else form.sinks,
                    used_S, num_heads, num_splits, window, HAS_SINKS=form.sinks is not None,
                    IS_WINDOWED=form.window is not None, SIZE=size, SPLIT=SPLIT, SPLITS=SPLITS,
                )  # fmt: skip
        return attended_SHD[None]


def decode_kernel_for(query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, form: AttentionForm) -> DecodeKernel | None:
    """The kernel that does this, if it runs there; chunks, and a cap together with sinks, are not known to it."""
    num_heads, size = query_1HTD.shape[1], query_1HTD.shape[-1]
    sharing = num_heads // key_1GTD.shape[1]
    if form.chunk is not None or (form.cap is not None and form.sinks is not None):
        return None
    if size not in HEAD_SIZES or key_1GTD.shape[-1] != size or sharing > MOST_SHARING:
        return None
    is_windowed, is_capped, has_sinks = (each is not None for each in (form.window, form.cap, form.sinks))
    device_type, dtype = query_1HTD.device.type, query_1HTD.dtype
    return _tried(device_type, dtype, size, _tried_instead(sharing), is_windowed, is_capped, has_sinks)


@cache
def _tried(
    device_type: str,
    dtype: torch.dtype,
    head_size: int,
    num_sharing: int,
    is_windowed: bool,
    is_capped: bool,
    has_sinks: bool,
) -> DecodeKernel | None:
    """The kernels, if they run there and are right; else a line in the log says why."""
    asked: dict[str, Any] = {"num_sharing": num_sharing, "is_windowed": is_windowed}
    asked |= {"head_size": head_size, "is_capped": is_capped, "has_sinks": has_sinks}
    kernels = own_kernels(
        MODULE,
        lambda each: relative_error(each, torch.device(device_type), dtype, **asked),
        device_type=device_type,
        dtype=dtype,
        event="device.no_paged_decode_kernel",
        instead="torch's kernels attend to the last tokens of sequences as they do to others, in more launches",
        **asked,
    )
    return None if kernels is None else DecodeKernel(kernels)


@torch.inference_mode()
def relative_error(
    kernels: Any,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_size: int = 64,
    num_sharing: int = 3,
    is_windowed: bool = False,
    is_capped: bool = False,
    has_sinks: bool = False,
) -> float:
    """The largest of some sequences, by norm; pages lie backwards, and what lies behind their ends is NaN."""
    num_groups, num_heads = 2, 2 * num_sharing
    counts = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    generator = torch.Generator().manual_seed(0)
    shape = (2, sum(counts), PAGE_TOKENS, num_groups, head_size)
    pool_2NPGD = torch.randn(shape, generator=generator).to(device, dtype)
    # Peaked, so that a key too many or too few shows.
    query_SHD = 2 * torch.randn(len(LENGTHS), num_heads, head_size, generator=generator).to(device, dtype)
    form = AttentionForm(
        head_size**-0.5,
        window=TRIED_WINDOW if is_windowed else None,
        cap=2.0 if is_capped else None,
        sinks=4 * torch.randn(num_heads, generator=generator).to(device, dtype) if has_sinks else None,
    )
    table_SM = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    expected = []
    last = sum(counts)
    for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        pages = torch.arange(last - 1, last - count - 1, -1)
        last -= count
        table_SM[row, :count] = pages
        if count == 0:
            expected.append(torch.zeros(num_heads, head_size, dtype=torch.float64, device=device))
            continue
        pool_2NPGD[:, pages[-1], length - (count - 1) * PAGE_TOKENS :] = torch.nan
        lying_2SGD = pool_2NPGD[:, pages.to(device)].flatten(1, 2).double()
        seen = lying_2SGD[:, form.first_key(length - 1) : length].transpose(1, 2)[:, None]
        exact = AttentionForm(form.scale, cap=form.cap, sinks=None if form.sinks is None else form.sinks.double())
        expected.append(attend(query_SHD[row, :, None][None].double(), *seen, form=exact)[0, 0])
    used_S = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    found_SHD = DecodeKernel(kernels).attend(
        query_SHD, *pool_2NPGD.unbind(), used_S=used_S, table_SM=table_SM.to(device), form=form
    )[0]
    right_SHD = torch.stack(expected)
    off_S, norm_S = (each.flatten(1).norm(dim=1) for each in (found_SHD.double() - right_SHD, right_SHD))
    return float((off_S / norm_S.clamp(min=1e-9)).max())


def _num_splits(num_keys: int, window: int | None) -> int:
    """At most, of a table of so many keys; a window begins somewhere in a split."""
    num_splits = -(-num_keys // SPLIT)
    return num_splits if window is None else min(num_splits, (window + SPLIT - 2) // SPLIT + 1)


def _num_rows(num_sharing: int) -> int:
    return max(FEWEST_KEYS, _power_of_two(num_sharing))


def _tried_instead(num_sharing: int) -> int:
    """What is compiled is the same for all numbers that fill the same rows; none of these does."""
    rows = _num_rows(num_sharing)
    return min(num_sharing, 3) if rows == FEWEST_KEYS else rows // 2 + 1


def _num_stages(head_size: int) -> int:
    """Two blocks of keys and values on their way while one is multiplied; of wide heads one, as there is no room.

    The compiler counts a step for pages, which are looked up in the table before.
    """
    return 5 if head_size <= 128 else 3


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
