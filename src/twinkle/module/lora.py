"""The LoRA pool: every trainable Linear of the base model is replaced once, adapters come and go as data.

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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from twinkle.module.adapter import AdapterLayout, LoraAdapter, LoraConfig, LoraPair, LoraShape
from twinkle.module.row_product import RowProduct
from twinkle.module.targets import Target, TargetKind

__all__ = ["LoraAdapter", "LoraConfig", "LoraLinear", "LoraPool", "Segment", "add_lora", "add_lora_gradient"]


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


class _SegmentedLinear(torch.autograd.Function):
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


class _Route:
    """Who owns which packed tokens in the pass that runs now."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()


class LoraLinear(torch.nn.Module):
    """Stands in for one frozen Linear and applies the routed adapters."""

    def __init__(self, base: torch.nn.Linear, path: str, route: _Route, product: RowProduct) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.path = path
        self._route = route
        self._product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the frozen weight and the update of each routed segment."""
        pairs = [
            SegmentPair(
                segment.start,
                segment.end,
                segment.adapter.scale,
                segment.adapter.compute_views[self.path],
                None if segment.gradient is None else segment.gradient[self.path],
            )
            for segment in self._route.segments
            if segment.adapter is not None and self.path in segment.adapter.compute_views
        ]
        x_TI = x.reshape(-1, self.in_features)
        y_TO: torch.Tensor = _SegmentedLinear.apply(x_TI, self.weight, self.bias, self._product, pairs)
        return y_TO.view(*x.shape[:-1], self.out_features)


class LoraPool:
    """Turns the targets of a frozen model into ``LoraLinear`` and makes adapters that fit them.

    The output projection stays as it is: its update is applied where logits are computed, since a whole ``[T, vocab]``
    is never kept, and since its weight may be the input embedding's.
    """

    def __init__(
        self, model: torch.nn.Module, targets: Sequence[Target], *, product: RowProduct, max_rank: int
    ) -> None:
        self.max_rank = max_rank
        self.product = product
        self._route = _Route()
        self._targets = tuple(targets)
        self._device = targets[0].module.weight.device
        self._compute_dtype = targets[0].module.weight.dtype
        for target in targets:
            if target.kind != "unembed":
                parent, _, name = target.path.rpartition(".")
                linear = LoraLinear(target.module, target.path, self._route, product)
                setattr(model.get_submodule(parent), name, linear)

    @property
    def unembed_path(self) -> str:
        """The path of the output projection."""
        return next(target.path for target in self._targets if target.kind == "unembed")

    def layout(self, config: LoraConfig) -> AdapterLayout:
        """Which modules an adapter of this config trains, and where their weights lie."""
        config.check(self.max_rank)
        trained: dict[TargetKind, bool] = {
            "attn": config.train_attn,
            "mlp": config.train_mlp,
            "unembed": config.train_unembed,
        }
        shapes = tuple(
            LoraShape(target.path, target.module.in_features, target.module.out_features)
            for target in self._targets
            if trained[target.kind]
        )
        return AdapterLayout(shapes, config.rank)

    def create(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A fresh adapter whose weights depend on nothing but its config."""
        adapter = self.create_empty(config, trainable=trainable)
        adapter.initialize()
        return adapter

    def create_empty(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """An adapter of zeros, to be filled from a file."""
        return LoraAdapter(
            config,
            self.layout(config),
            device=self._device,
            compute_dtype=self._compute_dtype,
            trainable=trainable,
        )

    @contextmanager
    def routed(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Within this context the packed tokens of a forward pass go through the adapters of ``segments``."""
        if self._route.segments:
            raise RuntimeError("a pass is already routed; the pool runs one pass at a time")
        self._route.segments = tuple(segments)
        try:
            yield
        finally:
            self._route.segments = ()
