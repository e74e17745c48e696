"""Linears that are given the same rows one after another, which have their low-rank updates made together.

A launch costs a GPU's host more than most of these products take. So the first of such Linears that is called computes
what all of them give; the others find it, as long as they are given the very same tensor.

Shapes: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from twinkle.module.row_product import RowProduct

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
"""Names of Linears of one parent that models give the same rows. A model that does not loses time, and nothing else."""

Weight = torch.Tensor | Callable[[], torch.Tensor]


class GroupUpdates(Protocol):
    """What the adapters of a pass add to Linears with the same rows."""

    def add(self, ys_TO: Sequence[torch.Tensor], x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Add to each Linear's ``y`` in place; return what ``add_gradients`` needs."""
        ...

    def add_gradients(
        self, dys_TO: Sequence[torch.Tensor], *, dx_TI: torch.Tensor, x_TI: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> None:
        """Add each row's share to ``dx`` and to the gradients of its owner's pairs, in place."""
        ...


class SharedInputLinears(torch.autograd.Function):
    """``y = x W^T + bias`` of several Linears, plus the low-rank updates of each row's owner.

    A ``W`` may be what makes one each time that it is needed: none is then kept for the way back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: torch.Tensor,
        weights_OI: Sequence[Weight],
        biases_O: Sequence[torch.Tensor | None],
        product: RowProduct,
        updates: GroupUpdates,
    ) -> tuple[torch.Tensor, ...]:
        ys_TO = products(x_TI, weights_OI, biases_O, product)
        saved = updates.add(ys_TO, x_TI)
        kept = [weight if isinstance(weight, torch.Tensor) else None for weight in weights_OI]
        ctx.product, ctx.updates, ctx.num_kept = product, updates, len(kept)
        ctx.makers = [None if isinstance(weight, torch.Tensor) else weight for weight in weights_OI]
        ctx.save_for_backward(x_TI, *kept, *saved)
        return tuple(ys_TO)

    @staticmethod
    def backward(ctx: Any, *dys_TO: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x_TI, *rest = ctx.saved_tensors
        weights = (
            kept if maker is None else maker() for kept, maker in zip(rest[: ctx.num_kept], ctx.makers, strict=True)
        )
        dx_TI: torch.Tensor = ctx.product(dys_TO[0], next(weights).t())
        for dy_TO, weight_OI in zip(dys_TO[1:], weights, strict=True):
            ctx.product.add_(dx_TI, dy_TO, weight_OI, 1.0)
        ctx.updates.add_gradients(dys_TO, dx_TI=dx_TI, x_TI=x_TI, saved=rest[ctx.num_kept :])
        return dx_TI, None, None, None, None


def products(
    x_TI: torch.Tensor, weights_OI: Sequence[Weight], biases_O: Sequence[torch.Tensor | None], product: RowProduct
) -> list[torch.Tensor]:
    """``x W^T + bias`` of each Linear."""
    return [
        product(x_TI, weight if isinstance(weight, torch.Tensor) else weight(), bias_O)
        for weight, bias_O in zip(weights_OI, biases_O, strict=True)
    ]


def siblings_of(widths: dict[str, int]) -> Iterator[tuple[str, ...]]:
    """The paths of Linears, given with their inputs, in groups that may share these; most stand alone."""
    grouped: set[str] = set()
    for path, width in widths.items():
        parent, _, name = path.rpartition(".")
        for names in SIBLINGS:
            if path in grouped or name not in names:
                continue
            known = [f"{parent}.{each}" for each in names]
            group = tuple(each for each in known if widths.get(each) == width)
            grouped.update(group)
            yield group
        if path not in grouped:
            yield (path,)
