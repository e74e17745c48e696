"""Attention over keys and values that lie in pages, in one call for many sequences, where torch has a kernel for it.

``torch.nn.attention.varlen.varlen_attn`` reads them through a table of pages. What it takes differs: FlashAttention 3
wants to be told how many keys are used and not where they end in a row, FlashAttention 2, torch's own, both, and of
splits nothing; older releases of torch have no table. So a call is tried, in each way, before it is trusted.

Shapes: H query heads, G key/value heads, T packed queries, S sequences, M pages in a row of the table, N pages of the
pool, P positions of a page, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from twinkle.infra.sending import send
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.tried import first_right
from twinkle.module.varlen import NONE, TOLERANCE, Ends, torch_kernel, ways_to_call

PAGE_TOKENS = 256
"""FlashAttention 2 takes multiples of this alone."""


class PagedKeys:
    """Which pages hold the keys of each sequence, and how many of them are used; told to the device once."""

    def __init__(self, lengths: Sequence[int], table_SM: np.ndarray, device: torch.device) -> None:
        told = send([*lengths, 0, *accumulate(lengths)], torch.int32, device)
        self.used_S, self.ends_S = told[: len(lengths)], told[len(lengths) :]
        self.table_SM = send(table_SM, torch.int32, device)
        self.longest = max(lengths)


@dataclass(frozen=True)
class PagedKernel:
    """torch's function, and whether it wants to know where keys would end in a row."""

    function: Callable[..., torch.Tensor]
    wants_ends: bool

    def attend(
        self,
        query_THD: torch.Tensor,
        key_NPGD: torch.Tensor,
        value_NPGD: torch.Tensor,
        *,
        queries: Ends,
        keys: PagedKeys,
        form: AttentionForm,
    ) -> torch.Tensor:
        """The attended values [1, T, H, D], causally within each sequence, whose last query sees its last key."""
        attended_THD = self.function(
            query_THD,
            key_NPGD,
            value_NPGD,
            queries.ends_S,
            keys.ends_S if self.wants_ends else None,
            queries.longest,
            keys.longest,
            scale=form.scale,
            # How many before itself each sees, and after itself.
            window_size=(-1 if form.window is None else form.window - 1, 0),
            enable_gqa=query_THD.shape[1] != key_NPGD.shape[2],
            seqused_k=keys.used_S,
            block_table=keys.table_SM,
        )
        return attended_THD[None]


def paged_kernel_for(query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, form: AttentionForm) -> PagedKernel | None:
    """The kernel that does this, if there is one; chunks, a cap and sinks are known to none."""
    if form.chunk is not None or form.cap is not None or form.sinks is not None:
        return None
    is_shared = query_1HTD.shape[1] != key_1GTD.shape[1]
    return _tried(query_1HTD.device.type, query_1HTD.dtype, query_1HTD.shape[-1], is_shared, form.window is not None)


@cache
def _tried(
    device_type: str, dtype: torch.dtype, head_size: int, is_shared: bool, is_windowed: bool
) -> PagedKernel | None:
    """A way to call torch's kernel that gives what is right; says once if there is none."""
    functions = ways_to_call(torch_kernel(device_type, dtype))
    return first_right(
        (PagedKernel(function, wants_ends) for function in functions for wants_ends in (False, True)),
        lambda kernel: _failure(kernel, torch.device(device_type), dtype, head_size, is_shared, is_windowed),
        device_type=device_type,
        dtype=dtype,
        head_size=head_size,
        event="device.no_paged_attention_kernel",
        none=NONE,
        instead="what lies in pages is laid side by side, or each sequence attended apart, slower",
    )


@torch.inference_mode()
def _failure(
    kernel: PagedKernel, device: torch.device, dtype: torch.dtype, head_size: int, is_shared: bool, is_windowed: bool
) -> Exception | None:
    """Why a call cannot be made, or gives something else.

    Two sequences, one of more than a page in pages that lie the other way round; then the last token of each alone.
    What lies behind their ends would show.
    """
    heads, groups = 2, 1 if is_shared else 2
    lengths, table = (PAGE_TOKENS + 4, 6), np.array([[2, 0], [1, 1]])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(lengths), heads + 2 * groups, head_size, generator=generator).to(device, dtype)
    queries, keys, values = rows.split((heads, groups, groups), dim=1)
    form = AttentionForm(head_size**-0.5, window=3 if is_windowed else None)
    pool = torch.full((2, 3, PAGE_TOKENS, groups, head_size), 50.0, device=device, dtype=dtype)
    first = 0
    for length, pages in zip(lengths, table.tolist(), strict=True):
        for number, start in enumerate(range(0, length, PAGE_TOKENS)):
            end = min(start + PAGE_TOKENS, length)
            for side, own in zip(pool, (keys, values), strict=True):
                side[pages[number], : end - start] = own[first + start : first + end]
        first += length
    last = [length - 1 for length in accumulate(lengths)]
    paged = PagedKeys(lengths, table, device)
    try:
        attended = kernel.attend(queries, *pool, queries=Ends(lengths, device), keys=paged, form=form)[0]
        at_end = kernel.attend(queries[last], *pool, queries=Ends((1, 1), device), keys=paged, form=form)[0]
    except (RuntimeError, TypeError, ValueError) as error:  # as torch says that it knows no such call
        return error
    right = torch.cat(
        [
            attend(*(each.transpose(0, 1)[None] for each in own), form=form, mask=form.mask(0, len(own[0]), 0, device))
            for own in zip(*(each.split(lengths) for each in (queries, keys, values)), strict=True)
        ],
        dim=1,
    )[0]
    if (attended - right).abs().max() > TOLERANCE or (at_end - right[last]).abs().max() > TOLERANCE:
        return ArithmeticError("its values are not those of attention sequence by sequence")
    return None
