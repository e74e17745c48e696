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
    """One small product after another, in the order of the segments. What it saves is ``x A^T`` [rows, R] of each."""

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
            add_lora(self.rows, y_TO[pair.start : pair.end], x_TI[pair.start : pair.end], pair.weight, pair.scale)
            for pair in pairs
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
        for pair, inner_TR in zip(pairs, saved, strict=True):
            rows = slice(pair.start, pair.end)
            add_lora_gradient(
                self.rows,
                dy_TO=dy_TO[rows],
                dx_TI=dx_TI[rows],
                x_TI=x_TI[rows],
                inner_TR=inner_TR,
                weight=pair.weight,
                gradient=pair.gradient,
                scale=pair.scale,
            )


def add_lora(product: RowProduct, y_TO: torch.Tensor, x_TI: torch.Tensor, pair: LoraPair, scale: float) -> torch.Tensor:
    """Add ``scale * x A^T B^T`` to ``y`` in place; return ``x A^T``, which the gradient needs."""
    inner_TR = product(x_TI, pair.a)
    product.add_(y_TO, inner_TR, pair.b, scale)
    return inner_TR


def add_lora_gradient(
    product: RowProduct,
    *,
    dy_TO: torch.Tensor,
    dx_TI: torch.Tensor | None,
    x_TI: torch.Tensor,
    inner_TR: torch.Tensor,
    weight: LoraPair,
    gradient: LoraPair | None,
    scale: float,
) -> None:
    """Add one segment's share to ``dx`` and to the gradient of its pair, in place."""
    d_inner_TR = product(dy_TO, weight.b.t())
    if gradient is not None:
        product.add_outer_(gradient.b, dy_TO, inner_TR, scale)
        product.add_outer_(gradient.a, d_inner_TR, x_TI, scale)
    if dx_TI is not None:
        product.add_(dx_TI, d_inner_TR, weight.a.t(), scale)
