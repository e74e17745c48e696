"""Low-rank updates of the packed rows of many adapters, forward and backward, each segment on its own.

Tokens of all tenants lie packed in one row; the route of a pass says which adapter serves which tokens. Each segment
does its own small products, so no arithmetic is shared between tenants beyond the product with the frozen weight, whose
rows are independent (see ``row_product``). That is what makes fused results equal those alone, and what keeps a
tenant's NaN in its own rows: a mask would not, since ``0 * NaN`` is NaN.

The gradients of A and B are added straight into a flat buffer by the backward pass; they are not autograd leaves. The
caller must therefore make the input embeddings require gradients.

Shapes: T packed tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.row_product import RowProduct


@dataclass(frozen=True, slots=True)
class Segment:
    """Packed tokens ``start:end`` belong to ``adapter`` (None: the base model alone).

    ``gradient`` is where the backward pass adds this segment's gradient; None computes none. For results that do not
    depend on the company, training uses one segment per datum.
    """

    adapter: LoraAdapter | None
    start: int
    end: int
    gradient: Mapping[str, LoraPair] | None = None


class SegmentPair(NamedTuple):
    """What one module needs of one segment."""

    start: int
    end: int
    scale: float
    weight: LoraPair
    gradient: LoraPair | None


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


class SegmentedLinear(torch.autograd.Function):
    """``y = x W^T + bias``, plus each segment's own low-rank update."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        product: RowProduct,
        pairs: Sequence[SegmentPair],
    ) -> torch.Tensor:
        y_TO = product(x_TI, weight_OI, bias_O)
        inners = [
            add_lora(product, y_TO[pair.start : pair.end], x_TI[pair.start : pair.end], pair.weight, pair.scale)
            for pair in pairs
        ]
        ctx.product, ctx.pairs = product, pairs
        ctx.save_for_backward(x_TI, weight_OI, *inners)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x_TI, weight_OI, *inners = ctx.saved_tensors
        dx_TI = ctx.product(dy_TO, weight_OI.t())
        for pair, inner_TR in zip(ctx.pairs, inners, strict=True):
            rows = slice(pair.start, pair.end)
            add_lora_gradient(
                ctx.product,
                dy_TO=dy_TO[rows],
                dx_TI=dx_TI[rows],
                x_TI=x_TI[rows],
                inner_TR=inner_TR,
                weight=pair.weight,
                gradient=pair.gradient,
                scale=pair.scale,
            )
        return dx_TI, None, None, None, None


class Route:
    """Who owns which packed tokens in the pass that runs now."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()

    def pairs(self, path: str) -> Iterator[SegmentPair]:
        """What the module of this path needs, segment by segment; those whose adapter leaves it alone are left out."""
        for segment in self.segments:
            if segment.adapter is not None and path in segment.adapter.compute_views:
                yield SegmentPair(
                    segment.start,
                    segment.end,
                    segment.adapter.scales[path],
                    segment.adapter.compute_views[path],
                    None if segment.gradient is None else segment.gradient[path],
                )
