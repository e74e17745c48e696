"""Packed products in a few grouped GEMMs, for devices where small kernels are bound by their launches.

Neighbouring segments of the same pair are one group; the groups' pairs are stacked, padded with zeros to one rank, and
``torch.nn.functional.grouped_mm`` multiplies each group's rows with its own matrices: two products forward and four
backward for all tenants of a layer, however many they are. A group's rows meet no other group's weights. Sums over
tokens run over a whole group, so the last bits of a gradient may depend on how many datums a job brought to a pass; the
``mkl-strict`` and ``tiled`` promises are kept by ``LoopedProducts`` alone.

Shapes: T packed tokens, G groups, A assignments of tokens to experts, E experts, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Self

import torch
from torch.nn import functional

from twinkle.module.packed_products import ExpertRows, SegmentPair, runs_of
from twinkle.module.row_product import RowProduct

RANK_MULTIPLE = 8
"""Rows of a stacked matrix must be a multiple of 16 bytes long, in bfloat16 too."""


def supports_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has kernels for grouped products of this dtype."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class GroupedProducts:
    """One grouped GEMM for all segments. What it saves is ``scale * x A^T`` [rows, R] of all."""

    rows: RowProduct

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[ExpertRows]) -> torch.Tensor:
        """See :class:`PackedProducts`."""
        num_experts = weight_EOI.shape[0]
        ends = [0] * num_experts
        for row in rows:
            ends[row.expert] = row.end
        # An expert without tokens ends where the one before it does.
        offsets = _offsets(list(accumulate(ends, max)), x_AI.device)
        return functional.grouped_mm(x_AI, weight_EOI.transpose(1, 2), offs=offsets)

    def add_updates(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, pairs: Sequence[SegmentPair]
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`PackedProducts`."""
        if not pairs:
            return ()
        groups = _Groups.of(pairs, x_TI)
        inner_TR = functional.grouped_mm(groups.take(x_TI), groups.stacked_a().transpose(1, 2), offs=groups.offsets)
        inner_TR = groups.scaled(inner_TR)
        groups.add(y_TO, functional.grouped_mm(inner_TR, groups.stacked_b().transpose(1, 2), offs=groups.offsets))
        return (inner_TR,)

    def add_update_gradients(
        self,
        *,
        dy_TO: torch.Tensor,
        dx_TI: torch.Tensor,
        x_TI: torch.Tensor,
        saved: Sequence[torch.Tensor],
        pairs: Sequence[SegmentPair],
    ) -> None:
        """See :class:`PackedProducts`."""
        if not pairs:
            return
        groups = _Groups.of(pairs, x_TI)
        (inner_TR,) = saved
        dy_rows_TO, x_rows_TI = groups.take(dy_TO).contiguous(), groups.take(x_TI)
        d_inner_TR = groups.scaled(functional.grouped_mm(dy_rows_TO, groups.stacked_b(), offs=groups.offsets))
        if any(pair.gradient is not None for pair in groups.pairs):
            groups.add_gradients(
                functional.grouped_mm(d_inner_TR.t(), x_rows_TI, offs=groups.offsets),
                functional.grouped_mm(dy_rows_TO.t(), inner_TR, offs=groups.offsets),
            )
        groups.add(dx_TI, functional.grouped_mm(d_inner_TR, groups.stacked_a(), offs=groups.offsets))


@dataclass(frozen=True, eq=False)
class _Groups:
    """Segments merged into groups, and the packed rows they have; ``rows`` None means all rows, in order.

    ``scales`` is [T, 1], the factor of each row's group, in float32.
    """

    pairs: tuple[SegmentPair, ...]
    rank: int
    offsets: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor | None

    @classmethod
    def of(cls, pairs: Sequence[SegmentPair], x_TI: torch.Tensor) -> Self:
        merged = tuple(_merge(pairs))
        device = x_TI.device
        lengths = torch.tensor([pair.end - pair.start for pair in merged])
        scales_G = torch.tensor([pair.scale for pair in merged], dtype=torch.float32)
        rows = None
        if int(lengths.sum()) != x_TI.shape[0]:
            rows = torch.cat([torch.arange(pair.start, pair.end) for pair in merged]).to(device)
        rank = max(pair.weight.a.shape[0] for pair in merged)
        return cls(
            pairs=merged,
            rank=-(-rank // RANK_MULTIPLE) * RANK_MULTIPLE,
            offsets=_offsets(lengths.cumsum(0).tolist(), device),
            scales=scales_G.repeat_interleave(lengths)[:, None].to(device),
            rows=rows,
        )

    def scaled(self, inner_TR: torch.Tensor) -> torch.Tensor:
        """Rows times their group's factor, rounded once: a factor in bfloat16 would be off by up to 0.2 % for all."""
        return (inner_TR * self.scales).to(inner_TR.dtype)

    def take(self, matrix_TN: torch.Tensor) -> torch.Tensor:
        """The groups' rows of a matrix over all packed rows."""
        return matrix_TN if self.rows is None else matrix_TN.index_select(0, self.rows)

    def add(self, total_TN: torch.Tensor, update_TN: torch.Tensor) -> None:
        """Add the groups' rows to those of a matrix over all packed rows, in place."""
        if self.rows is None:
            total_TN.add_(update_TN)
        else:
            total_TN.index_add_(0, self.rows, update_TN)

    def stacked_a(self) -> torch.Tensor:
        """The groups' A [G, R, I], zeros below each group's own rank."""
        first = self.pairs[0].weight.a
        stack_GRI = first.new_zeros(len(self.pairs), self.rank, first.shape[1])
        views = [stack[: pair.weight.a.shape[0]] for stack, pair in zip(stack_GRI, self.pairs, strict=True)]
        torch._foreach_copy_(views, [pair.weight.a for pair in self.pairs])
        return stack_GRI

    def stacked_b(self) -> torch.Tensor:
        """The groups' B [G, O, R], zeros right of each group's own rank."""
        first = self.pairs[0].weight.b
        stack_GOR = first.new_zeros(len(self.pairs), first.shape[0], self.rank)
        views = [stack[:, : pair.weight.b.shape[1]] for stack, pair in zip(stack_GOR, self.pairs, strict=True)]
        torch._foreach_copy_(views, [pair.weight.b for pair in self.pairs])
        return stack_GOR

    def add_gradients(self, d_a_GRI: torch.Tensor, d_b_GOR: torch.Tensor) -> None:
        """Add each group's gradient to where its segments want it, group after group where two share a place."""
        totals: list[torch.Tensor] = []
        shares: list[torch.Tensor] = []
        taken: set[int] = set()
        for index, pair in enumerate(self.pairs):
            if pair.gradient is None:
                continue
            if pair.gradient.a.data_ptr() in taken:
                torch._foreach_add_(totals, shares)
                totals, shares, taken = [], [], set()
            taken.add(pair.gradient.a.data_ptr())
            rank = pair.weight.a.shape[0]
            totals += pair.gradient
            shares += (
                d_a_GRI[index, :rank].to(pair.gradient.a.dtype),
                d_b_GOR[index, :, :rank].to(pair.gradient.b.dtype),
            )
        if totals:
            torch._foreach_add_(totals, shares)


def _merge(pairs: Sequence[SegmentPair]) -> list[SegmentPair]:
    """One segment for all neighbours that share their weights and where their gradients go."""
    merged: list[SegmentPair] = []
    for run in runs_of(pairs):
        for _, group in groupby(run, key=lambda pair: None if pair.gradient is None else pair.gradient.a.data_ptr()):
            first, *others = group
            merged.append(first._replace(end=others[-1].end) if others else first)
    return merged


def _offsets(ends: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True)
