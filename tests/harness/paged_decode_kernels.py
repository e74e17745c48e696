"""A stand-in for the kernels of single queries over pages, which only GPUs run: split by split, as they cut keys.

Like them it looks at lengths and pages when it is called, reads no key that is not seen, and writes nothing of splits
without any. What nobody wrote is NaN, so that whoever reads it shows.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.lora_kernels import Kernel
from twinkle.module.paged_decode import DecodeKernel


class DecodeKernels:
    """What ``twinkle.module.paged_decode_kernels`` has."""

    def __init__(self) -> None:
        self.attend_splits = Kernel(_attend_splits)
        self.combine_splits = Kernel(_combine_splits)


def decode_kernel() -> DecodeKernel:
    """One that counts its launches from zero."""
    return DecodeKernel(DecodeKernels())


def _first(end: int, window: int, is_windowed: bool) -> int:
    return max(0, end - window) if is_windowed else 0


def _attend_splits(
    grid: tuple[int, int, int], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, parts: torch.Tensor,
    maxima: torch.Tensor, sums: torch.Tensor, used: torch.Tensor, table: torch.Tensor, table_stride: int,
    heads: int, groups: int, num_splits: int, scale: float, cap: float, window: int,
    *, IS_CAPPED: bool, IS_WINDOWED: bool, ROWS: int, SIZE: int, PAGE: int, SPLIT: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    rows, shared = queries.shape[0], heads // groups
    assert grid == (rows, groups, num_splits) and all(grid) and groups * shared == heads
    assert queries.shape == (rows, heads, SIZE) and queries.is_contiguous()
    assert keys.shape == values.shape == (len(keys), PAGE, groups, SIZE)
    assert keys.is_contiguous() and values.is_contiguous() and queries.dtype == keys.dtype == values.dtype
    assert used.shape == (rows,) and used.is_contiguous() and used.dtype == table.dtype == torch.int32
    assert len(table) == rows and table.stride(1) == 1 and table.stride(0) == table_stride
    assert parts.shape == (*maxima.shape, SIZE) and maxima.shape == sums.shape == (rows, heads, num_splits)
    assert all(each.is_contiguous() and each.dtype == torch.float32 for each in (parts, maxima, sums))
    assert shared <= ROWS and ROWS >= 16 and ROWS.bit_count() == 1
    assert PAGE % BLOCK == 0 and SPLIT % BLOCK == 0 and BLOCK >= 16 and BLOCK.bit_count() == 1
    for each in (parts, maxima, sums):
        each.fill_(torch.nan)
    # As a kernel, it lets the host wait for nothing.
    for row, (end, pages_M) in enumerate(zip(used.numpy().tolist(), table, strict=True)):
        first = _first(end, window, IS_WINDOWED)
        for number in range(num_splits):
            split = (first // SPLIT + number) * SPLIT
            if split >= end:
                break
            positions = torch.arange(max(split, first), min(split + SPLIT, end))
            slots = pages_M[positions // PAGE].long() * PAGE + positions % PAGE
            key_GSD, value_GSD = (each.flatten(0, 1)[slots].transpose(0, 1).float() for each in (keys, values))
            score_GRS = queries[row].view(groups, shared, SIZE).float() @ key_GSD.transpose(1, 2) * scale
            if IS_CAPPED:
                score_GRS = cap * (score_GRS / cap).tanh()
            maximum_GR = score_GRS.amax(-1)
            weight_GRS = (score_GRS - maximum_GR[..., None]).exp()
            maxima[row, :, number] = maximum_GR.flatten()
            sums[row, :, number] = weight_GRS.sum(-1).flatten()
            parts[row, :, number] = (weight_GRS.to(values.dtype).float() @ value_GSD).flatten(0, 1)


def _combine_splits(
    grid: tuple[int, int], attended: torch.Tensor, parts: torch.Tensor, maxima: torch.Tensor, sums: torch.Tensor,
    sinks: torch.Tensor, used: torch.Tensor, heads: int, num_splits: int, window: int,
    *, HAS_SINKS: bool, IS_WINDOWED: bool, SIZE: int, SPLIT: int, SPLITS: int, **_: Any,
) -> None:  # fmt: skip
    assert grid == (len(used), heads) and all(grid) and SPLITS.bit_count() == 1
    assert attended.shape == (len(used), heads, SIZE) and attended.is_contiguous()
    assert parts.shape == (len(used), heads, num_splits, SIZE)
    assert not HAS_SINKS or (sinks.shape == (heads,) and sinks.is_contiguous())
    for row, end in enumerate(used.numpy().tolist()):
        num_written = -(-end // SPLIT) - _first(end, window, IS_WINDOWED) // SPLIT
        assert num_written <= num_splits
        if end == 0:
            attended[row] = 0
            continue
        maximum_HK, sum_HK, part_HKD = (each[row, :, :num_written] for each in (maxima, sums, parts))
        if HAS_SINKS:
            # One more part, of weight one and of no value.
            maximum_HK = torch.cat((maximum_HK, sinks.float()[:, None]), dim=1)
            sum_HK = torch.cat((sum_HK, torch.ones(heads, 1)), dim=1)
            part_HKD = torch.cat((part_HKD, torch.zeros(heads, 1, SIZE)), dim=1)
        weight_HK = (maximum_HK - maximum_HK.amax(1, keepdim=True)).exp()
        total_H1 = (weight_HK * sum_HK).sum(1, keepdim=True)
        attended[row] = ((weight_HK[..., None] * part_HKD).sum(1) / total_H1).to(attended.dtype)
