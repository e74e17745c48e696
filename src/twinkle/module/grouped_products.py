"""Products of rows with the matrix of their group, all groups in one kernel.

Where groups end is known to the device alone: nothing here waits for it. The kernel takes fewer than ``MAX_GROUPS``
groups; more are computed a range at a time, each over all rows, of which those of other ranges are thrown away.

Shapes: A rows, G groups, N inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

KERNEL_GENERATIONS = (9, 10)
"""Of GPUs, by the first number of their compute capability (H100 and H200, B200), for which torch has the kernel."""
MAX_GROUPS = 1024
ROW_BYTES = 16
"""Rows of all its matrices must be a multiple of it long."""


def supports_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has kernels for grouped products of this dtype.

    Others are served by torch too, but product by product, for which the host reads where groups end, in each layer.
    """
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major in KERNEL_GENERATIONS


def fits_kernel(num_features: int, dtype: torch.dtype) -> bool:
    """Whether rows of so many features are as long as the kernel wants them."""
    return num_features * dtype.itemsize % ROW_BYTES == 0


def rows_by_group(x_AN: torch.Tensor, weight_GNM: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """``x W_g`` [A, M] for the rows of each group; the last group ends with the last row."""
    num_groups = weight_GNM.shape[0]
    if num_groups < MAX_GROUPS:
        return functional.grouped_mm(x_AN, weight_GNM, offs=ends_G)
    row_A1 = torch.arange(x_AN.shape[0], device=x_AN.device, dtype=ends_G.dtype)[:, None]
    y_AM = x_AN.new_empty(0)
    for start, end in _ranges(num_groups):
        # A neighbour on each side takes the rows before and after: every row has a group, and no matrix is copied.
        first, last = max(start - 1, 0), min(end + 1, num_groups)
        ends = torch.cat((ends_G[first : last - 1], ends_G[-1:]))
        part_AM = functional.grouped_mm(x_AN, weight_GNM[first:last], offs=ends)
        y_AM = torch.where(row_A1 < ends_G[start - 1], y_AM, part_AM) if start else part_AM
    return y_AM


def sums_by_group(left_AM: torch.Tensor, right_AN: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """``left^T right`` [G, M, N] over the rows of each group."""
    num_groups = ends_G.shape[0]
    left_MA = left_AM.t()
    if num_groups < MAX_GROUPS:
        return functional.grouped_mm(left_MA, right_AN, offs=ends_G)
    parts: list[torch.Tensor] = []
    for start, end in _ranges(num_groups):
        first = max(start - 1, 0)
        part_GMN = functional.grouped_mm(left_MA, right_AN, offs=ends_G[first:end])
        parts.append(part_GMN[start - first :])
    return torch.cat(parts)


def _ranges(num_groups: int) -> Iterator[tuple[int, int]]:
    """Ranges of groups that leave room for a neighbour on each side."""
    size = MAX_GROUPS - 3
    return ((start, min(start + size, num_groups)) for start in range(0, num_groups, size))
