"""Who owns which packed rows, and a Linear whose rows belong to many adapters.

Tokens of all tenants lie packed in one row; the route of a pass says which adapter serves which tokens. How the rows
are multiplied is the business of ``packed_products``.

The gradients of A and B are added straight into a flat buffer by the backward pass; they are not autograd leaves. The
caller must therefore make the input embeddings require gradients.

Shapes: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.packed_products import PackedProducts, SegmentPair


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


class SegmentedLinear(torch.autograd.Function):
    """``y = x W^T + bias``, plus each segment's own low-rank update."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        products: PackedProducts,
        pairs: Sequence[SegmentPair],
    ) -> torch.Tensor:
        y_TO = products.rows(x_TI, weight_OI, bias_O)
        saved = products.add_updates(y_TO, x_TI, pairs)
        ctx.products, ctx.pairs = products, pairs
        ctx.save_for_backward(x_TI, weight_OI, *saved)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x_TI, weight_OI, *saved = ctx.saved_tensors
        dx_TI = ctx.products.rows(dy_TO, weight_OI.t())
        ctx.products.add_update_gradients(dy_TO=dy_TO, dx_TI=dx_TI, x_TI=x_TI, saved=saved, pairs=ctx.pairs)
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
