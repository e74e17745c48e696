"""The products of a layer over packed rows: with its frozen weight, and with the low-rank pairs of whoever owns a row.

``LoopedProducts`` does the low-rank products segment by segment. No arithmetic is shared between tenants beyond the
product with the frozen weight, whose rows are independent (see ``row_product``): that is what makes fused results equal
those alone, and what keeps a tenant's NaN in its own rows. A mask would not, since ``0 * NaN`` is NaN. It is the
reference for ``stacked``, which does the same with few kernels where launching one costs more than running it.

Shapes: T packed tokens, A assignments of tokens to experts, E experts, I inputs, O outputs, R rank;
r rows of a run, n of one of its segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments that share ``weight``."""

    start: int
    end: int
    scale: float
    weight: LoraPair
    pairs: tuple[SegmentPair, ...]


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


class LoopedUpdates:
    """The updates of one layer, segment by segment; the segments come in the order of their rows."""

    def __init__(self, products: LoopedProducts, pairs: Iterable[SegmentPair]) -> None:
        self._rows = products.rows
        self._runs = runs_of(pairs)
        self._sizes: list[int] = []
        self._end = 0
        for run in self._runs:
            self._sizes += (run.start - self._end, run.end - run.start)
            self._end = run.end

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`LayerUpdates`."""
        return tuple(
            _add_lora(self._rows, y_rO, x_rI, run)
            for run, y_rO, x_rI in zip(self._runs, self._cut(y_TO), self._cut(x_TI), strict=True)
        )

    def add_gradients(
        self, *, dy_TO: torch.Tensor, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """See :class:`LayerUpdates`."""
        cuts = (self._cut(matrix) for matrix in (dy_TO, dx_TI, x_TI))
        for run, inner_rR, dy_rO, dx_rI, x_rI in zip(self._runs, saved, *cuts, strict=True):
            _add_lora_gradients(self._rows, dy_rO=dy_rO, dx_rI=dx_rI, x_rI=x_rI, inner_rR=inner_rR, run=run)

    def _cut(self, matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of each run: by one call, since there are many calls of little else."""
        return matrix.split((*self._sizes, matrix.shape[0] - self._end))[1::2]


def runs_of(pairs: Iterable[SegmentPair]) -> list[Run]:
    """Neighbouring segments that share their weights."""
    runs: list[list[SegmentPair]] = []
    for pair in pairs:
        if runs and runs[-1][-1].end == pair.start and _is_same(runs[-1][-1].weight, pair.weight):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [Run(run[0].start, run[-1].end, run[0].scale, run[0].weight, tuple(run)) for run in runs]


def _add_lora(product: RowProduct, y_rO: torch.Tensor, x_rI: torch.Tensor, run: Run) -> torch.Tensor:
    """Add ``scale * x A^T B^T`` to ``y`` in place for all rows of a run; return ``x A^T``, which the gradient needs."""
    inner_rR = product(x_rI, run.weight.a)
    product.add_(y_rO, inner_rR, run.weight.b.t(), run.scale)
    return inner_rR


def _add_lora_gradients(
    product: RowProduct,
    *,
    dy_rO: torch.Tensor,
    dx_rI: torch.Tensor,
    x_rI: torch.Tensor,
    inner_rR: torch.Tensor,
    run: Run,
) -> None:
    """Add a run's share to ``dx`` and, segment by segment, to the gradients of its pairs, in place.

    The matrices hold the run's rows only.
    """
    scale = run.scale
    d_inner_rR = product.times(dy_rO, run.weight.b)
    if len(run.pairs) == 1:
        _add_sums(product, run.pairs[0].gradient, dy_rO, inner_rR, d_inner_rR, x_rI, scale)
    else:
        sizes = [pair.end - pair.start for pair in run.pairs]
        dy, inner, d_inner, x = (matrix.split(sizes) for matrix in (dy_rO, inner_rR, d_inner_rR, x_rI))
        for number, pair in enumerate(run.pairs):
            _add_sums(product, pair.gradient, dy[number], inner[number], d_inner[number], x[number], scale)
    product.add_(dx_rI, d_inner_rR, run.weight.a, scale)


def _add_sums(
    product: RowProduct,
    gradient: LoraPair | None,
    dy_nO: torch.Tensor,
    inner_nR: torch.Tensor,
    d_inner_nR: torch.Tensor,
    x_nI: torch.Tensor,
    scale: float,
) -> None:
    """Add what the rows of one segment say to its gradient."""
    if gradient is not None:
        product.add_outer_(gradient.b, dy_nO, inner_nR, scale)
        product.add_outer_(gradient.a, d_inner_nR, x_nI, scale)


def _is_same(left: LoraPair, right: LoraPair) -> bool:
    """Whether two pairs are the same memory."""
    return left.a.data_ptr() == right.a.data_ptr() and left.a.shape == right.a.shape
