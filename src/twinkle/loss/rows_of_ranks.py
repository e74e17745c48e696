"""Rows of all ranks, for losses that compare them.

Shapes: B rows of this rank, A rows of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def rows_of_all(values_B: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks (A, ...) in the order of the ranks, which may have different numbers of them; no graph."""
    sizes = _sizes(values_B, group)
    padded = values_B.new_zeros((max(sizes), *values_B.shape[1:]))
    padded[: len(values_B)] = values_B
    gathered = [torch.empty_like(padded) for _ in sizes]
    distributed.all_gather(gathered, padded, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


class RowsOfAll(torch.autograd.Function):
    """The same with a graph to this rank's rows: their gradient times the number of ranks, over which a mean is taken
    afterwards."""

    @staticmethod
    def forward(ctx: Any, values_B: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        """The rows of all ranks."""
        rank = distributed.get_rank(group)
        sizes = _sizes(values_B, group)
        ctx.first, ctx.size, ctx.num_ranks = sum(sizes[:rank]), len(values_B), len(sizes)
        return rows_of_all(values_B, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        """That of this rank's rows."""
        return ctx.num_ranks * gradients[0][ctx.first : ctx.first + ctx.size], None


def _sizes(values_B: torch.Tensor, group: distributed.ProcessGroup) -> list[int]:
    own = torch.tensor([len(values_B)], device=values_B.device)
    sizes = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(sizes, own, group=group)
    return [int(size) for size in sizes]
