"""The products of a layer over packed rows: with its frozen weight, and with the low-rank pairs of whoever owns a row.

``LoopedProducts`` does the low-rank products segment by segment. No arithmetic is shared between tenants beyond the
product with the frozen weight, whose rows are independent (see ``row_product``): that is what makes fused results equal
those alone, and what keeps a tenant's NaN in its own rows. A mask would not, since ``0 * NaN`` is NaN. It is the
reference for ``grouped_products``, which does the same with few kernels where launching one costs more than running it.

Shapes: T packed tokens, A assignments of tokens to experts, E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from twinkle.module.adapter import LoraPair
from twinkle.module.row_product import RowProduct


class SegmentPair(NamedTuple):
    """What one module needs of one segment."""

    start: int
    end: int
    scale: float
    weight: LoraPair
    gradient: LoraPair | None


@dataclass(frozen=True)
class ExpertRows:
    """Assignments ``start:end`` belong to ``expert``."""

    expert: int
    start: int
    end: int


class PackedProducts(Protocol):
    """How the layers of a model multiply."""

    @property
    def rows(self) -> RowProduct:
        """The product with one matrix for all rows."""
        ...

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[ExpertRows]) -> torch.Tensor:
        """``x W_e^T`` [A, O] for the rows of each expert; ``rows`` cover all of ``x``, in order."""
        ...

    def add_updates(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, pairs: Sequence[SegmentPair]
    ) -> tuple[torch.Tensor, ...]:
        """Add ``scale * x A^T B^T`` of each segment to ``y`` in place; return what ``add_update_gradients`` needs."""
        ...

    def add_update_gradients(
        self,
        *,
        dy_TO: torch.Tensor,
        dx_TI: torch.Tensor,
        x_TI: torch.Tensor,
        saved: Sequence[torch.Tensor],
        pairs: Sequence[SegmentPair],
    ) -> None:
        """Add each segment's share to ``dx`` and to the gradient of its pair, in place."""
        ...


@dataclass(frozen=True)
class LoopedProducts:
    """One small product after another, in the order of the segments. What it saves is ``x A^T`` [rows, R] of each run.

    Neighbouring segments of one adapter are a run: their rows, being independent, are multiplied at once. Sums over
    tokens are made segment by segment.
    """

    rows: RowProduct

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[ExpertRows]) -> torch.Tensor:
        """See :class:`PackedProducts`."""
        y_AO = x_AI.new_empty(x_AI.shape[0], weight_EOI.shape[1])
        for row in rows:
            y_AO[row.start : row.end] = self.rows(x_AI[row.start : row.end], weight_EOI[row.expert])
        return y_AO

    def add_updates(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, pairs: Sequence[SegmentPair]
    ) -> tuple[torch.Tensor, ...]:
        """See :class:`PackedProducts`."""
        return tuple(
            _add_lora(self.rows, y_TO[run[0].start : run[-1].end], x_TI[run[0].start : run[-1].end], run[0])
            for run in runs_of(pairs)
        )

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
        for run, inner_TR in zip(runs_of(pairs), saved, strict=True):
            rows = slice(run[0].start, run[-1].end)
            _add_lora_gradients(
                self.rows, dy_TO=dy_TO[rows], dx_TI=dx_TI[rows], x_TI=x_TI[rows], inner_TR=inner_TR, run=run
            )


def runs_of(pairs: Sequence[SegmentPair]) -> list[list[SegmentPair]]:
    """Neighbouring segments that share their weights."""
    runs: list[list[SegmentPair]] = []
    for pair in pairs:
        if runs and runs[-1][-1].end == pair.start and _is_same(runs[-1][-1].weight, pair.weight):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return runs


def _add_lora(product: RowProduct, y_TO: torch.Tensor, x_TI: torch.Tensor, pair: SegmentPair) -> torch.Tensor:
    """Add ``scale * x A^T B^T`` to ``y`` in place, for all its rows; return ``x A^T``, which the gradient needs."""
    inner_TR = product(x_TI, pair.weight.a)
    product.add_(y_TO, inner_TR, pair.weight.b, pair.scale)
    return inner_TR


def _add_lora_gradients(
    product: RowProduct,
    *,
    dy_TO: torch.Tensor,
    dx_TI: torch.Tensor,
    x_TI: torch.Tensor,
    inner_TR: torch.Tensor,
    run: Sequence[SegmentPair],
) -> None:
    """Add a run's share to ``dx`` and, segment by segment, to the gradients of its pairs, in place.

    The matrices hold the run's rows only.
    """
    weight, scale, first = run[0].weight, run[0].scale, run[0].start
    d_inner_TR = product(dy_TO, weight.b.t())
    for pair in run:
        if pair.gradient is not None:
            rows = slice(pair.start - first, pair.end - first)
            product.add_outer_(pair.gradient.b, dy_TO[rows], inner_TR[rows], scale)
            product.add_outer_(pair.gradient.a, d_inner_TR[rows], x_TI[rows], scale)
    product.add_(dx_TI, d_inner_TR, weight.a.t(), scale)


def _is_same(left: LoraPair, right: LoraPair) -> bool:
    """Whether two pairs are the same memory."""
    return left.a.data_ptr() == right.a.data_ptr() and left.a.shape == right.a.shape
