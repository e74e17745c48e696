"""Who owns which packed rows, and a Linear whose rows belong to many adapters.

Tokens of all tenants lie packed in one row; the route of a pass says which adapter serves which tokens. How the rows
are multiplied is the business of ``packed_products`` and of ``stacked``.

The gradients of A and B are added straight into a flat buffer by the backward pass; they are not autograd leaves. The
caller must therefore make the input embeddings require gradients.

Shapes: T packed tokens, K experts a token, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.expert_rows import Assignments, LoopedAssignments
from twinkle.module.packed_products import LayerUpdates, LoopedProducts, LoopedUpdates, SegmentPair
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


class SegmentedLinear(torch.autograd.Function):
    """``y = x W^T + bias``, plus the low-rank update of each row's owner.

    ``W`` is a tensor, or what makes one each time that it is needed: none is then kept for the way back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor | Callable[[], torch.Tensor],
        bias_O: torch.Tensor | None,
        product: RowProduct,
        updates: LayerUpdates,
    ) -> torch.Tensor:
        kept_OI = weight_OI if isinstance(weight_OI, torch.Tensor) else None
        y_TO = product(x_TI, weight_OI if isinstance(weight_OI, torch.Tensor) else weight_OI(), bias_O)
        saved = updates.add(y_TO, x_TI)
        ctx.product, ctx.updates, ctx.make = product, updates, weight_OI if kept_OI is None else None
        ctx.save_for_backward(x_TI, kept_OI, *saved)
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x_TI, weight_OI, *saved = ctx.saved_tensors
        dx_TI = ctx.product(dy_TO, (weight_OI if ctx.make is None else ctx.make()).t())
        ctx.updates.add_gradients(dy_TO=dy_TO, dx_TI=dx_TI, x_TI=x_TI, saved=saved)
        return dx_TI, None, None, None, None


class RoutedPass(Protocol):
    """What the layers of one pass are told."""

    def updates(self, path: str) -> LayerUpdates:
        """What the adapters add to the Linear of this path."""
        ...

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """The tokens sorted by the experts that a router chose for them."""
        ...


class Route:
    """Who owns which packed tokens of a pass, for products segment by segment."""

    def __init__(self, segments: Sequence[Segment], products: LoopedProducts) -> None:
        self.segments = tuple(segments)
        self._products = products

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

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`RoutedPass`."""
        return LoopedUpdates(self._products, self.pairs(path))

    def assign(self, experts_TK: torch.Tensor, num_experts: int) -> Assignments:
        """See :class:`RoutedPass`."""
        return LoopedAssignments(experts_TK, num_experts, self._products, lambda path: tuple(self.pairs(path)))


class Routing:
    """Where layers find the pass that runs now."""

    def __init__(self, rows: RowProduct, idle: RoutedPass) -> None:
        self.rows = rows
        self.idle = idle
        """Of a pass over rows that nobody owns."""
        self.now = idle
        self.ahead: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """By path, what a Linear gives for which rows, computed before it is called."""
