"""The products of a layer over packed rows: with its frozen weight, and with the low-rank pairs of whoever owns a row.

``LoopedProducts`` does the low-rank products segment by segment. No arithmetic is shared between tenants beyond the
product with the frozen weight, whose rows are independent (see ``row_product``): that is what makes fused results equal
those alone, and what keeps a tenant's NaN in its own rows. A mask would not, since ``0 * NaN`` is NaN. It is the
reference for ``stacked``, which does the same with few kernels where launching one costs more than running it.

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


class LayerUpdates(Protocol):
    """What the adapters of a pass add to one layer."""

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add ``scale * x A^T B^T`` of each row's owner to ``y`` in place; return what ``add_gradients`` needs."""
        ...

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """Add each row's share to ``dx`` and to the gradient of its owner's pair, in place."""
        ...


class NoUpdates:
    """Of a layer that no adapter of the pass trains."""

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        return ()

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""


@dataclass(frozen=True)
class LoopedProducts:
    """One small product after another, in the order of the segments. What it saves is ``x A^T`` [rows, R] of each run.

    Neighbouring segments of one adapter are a run: their rows, being independent, are multiplied at once. Sums over
    tokens are made segment by segment.
    """

    rows: RowProduct

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor, rows: Sequence[ExpertRows]) -> torch.Tensor:
        """``x W_e^T`` [A, O] for the rows of each expert; ``rows`` cover all of ``x``, in order."""
        y_AO = x_AI.new_empty(x_AI.shape[0], weight_EOI.shape[1])
        for row in rows:
            y_AO[row.start : row.end] = self.rows(x_AI[row.start : row.end], weight_EOI[row.expert])
        return y_AO

    def add_updates(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, pairs: Sequence[SegmentPair]
    ) -> tuple[torch.Tensor, ...]:
        """Add each segment's update to ``y`` in place; return what its gradient needs."""
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
        """Add each segment's share to ``dx`` and to the gradient of its pair, in place."""
        for run, inner_TR in zip(runs_of(pairs), saved, strict=True):
            rows = slice(run[0].start, run[-1].end)
            _add_lora_gradients(
                self.rows, dy_TO=dy_TO[rows], dx_TI=dx_TI[rows], x_TI=x_TI[rows], inner_TR=inner_TR, run=run
            )


@dataclass(frozen=True)
class LoopedUpdates:
    """The updates of one layer, segment by segment."""

    products: LoopedProducts
    pairs: Sequence[SegmentPair]

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        return self.products.add_updates(y_TO, x_TI, self.pairs)

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""
        self.products.add_update_gradients(dy_TO=dy_TO, dx_TI=dx_TI, x_TI=x_TI, saved=saved, pairs=self.pairs)


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
