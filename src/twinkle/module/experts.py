"""A layer of fused experts, each token in a few of them, each tenant with adapters of its own on every expert.

The tokens of a pass are sorted by expert. Products with an expert's frozen weight run over all its tokens at once,
their rows being independent (``row_product``); each (segment, expert) does its own small products, and within an expert
segments stay in the order they are packed in. What a token gets is summed over its experts in the order the router
names them, so no sum depends on the company.

Shapes: T packed tokens, K experts a token, A = T * K assignments of tokens to experts (sorted by expert, then by
token), E experts, H hidden size, I inputs, O outputs, M intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinkle.module.expert_forms import ExpertForm
from twinkle.module.packed_products import ExpertRows, PackedProducts, SegmentPair
from twinkle.module.segmented import Route


class Assignments:
    """Which token goes to which expert in one pass, and where it stands once they are sorted.

    ``order_A`` says which entry of the flattened choice stands at each sorted place, ``places_TK`` the reverse;
    ``experts_A`` and ``tokens_A`` are the expert and the token of each sorted place.
    """

    def __init__(self, experts_TK: torch.Tensor, num_experts: int) -> None:
        self.num_tokens, self.num_choices = experts_TK.shape
        experts_A = experts_TK.reshape(-1).cpu().numpy()
        order_A = np.argsort(experts_A, kind="stable")
        places_A = np.empty_like(order_A)
        places_A[order_A] = np.arange(order_A.size)
        device = experts_TK.device
        self.order_A = torch.from_numpy(order_A).to(device)
        self.places_TK = torch.from_numpy(places_A).to(device).view(self.num_tokens, self.num_choices)
        self.tokens_A = self.order_A // self.num_choices
        self.experts_A = torch.from_numpy(experts_A[order_A]).to(device)
        self._first_E = np.searchsorted(experts_A[order_A], np.arange(num_experts + 1))
        # Sorted like the assignments, so that the rows of any (expert, segment) lie between two searches.
        self._sorted_A = experts_A[order_A] * self.num_tokens + order_A // self.num_choices

    def experts(self) -> list[ExpertRows]:
        """The experts that have any token, with their rows."""
        first_E = self._first_E
        return [
            ExpertRows(expert, int(first_E[expert]), int(first_E[expert + 1]))
            for expert in np.flatnonzero(np.diff(first_E)).tolist()
        ]

    def split(self, pairs: Sequence[SegmentPair]) -> list[SegmentPair]:
        """For each (expert, segment) that has any token the pair of its rows, ordered by expert, then by segment."""
        rows = self.experts()
        offsets = np.array([row.expert * self.num_tokens for row in rows])[:, None]
        starts = np.searchsorted(self._sorted_A, offsets + [pair.start for pair in pairs]).tolist()
        ends = np.searchsorted(self._sorted_A, offsets + [pair.end for pair in pairs]).tolist()
        return [
            SegmentPair(
                start,
                end,
                pair.scale,
                pair.weight.expert(row.expert),
                None if pair.gradient is None else pair.gradient.expert(row.expert),
            )
            for row, row_starts, row_ends in zip(rows, starts, ends, strict=True)
            for pair, start, end in zip(pairs, row_starts, row_ends, strict=True)
            if start < end
        ]


class _Dispatch(torch.autograd.Function):
    """Rows of tokens to rows of assignments; backward, a token's gradients are added in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, assignments: Assignments) -> torch.Tensor:
        ctx.assignments = assignments
        return x_TH.index_select(0, assignments.tokens_A)

    @staticmethod
    def backward(ctx: Any, dx_AH: torch.Tensor) -> tuple[torch.Tensor, None]:
        places_TK = ctx.assignments.places_TK
        dx_TH = dx_AH.index_select(0, places_TK[:, 0])
        for choice in range(1, places_TK.shape[1]):
            dx_TH += dx_AH.index_select(0, places_TK[:, choice])
        return dx_TH, None


class _Combine(torch.autograd.Function):
    """The weighted sum of a token's experts, in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, y_AH: torch.Tensor, weights_TK: torch.Tensor, assignments: Assignments) -> torch.Tensor:
        ctx.assignments = assignments
        ctx.save_for_backward(y_AH, weights_TK)
        places_TK = assignments.places_TK
        sum_TH = y_AH.index_select(0, places_TK[:, 0]) * weights_TK[:, :1]
        for choice in range(1, places_TK.shape[1]):
            # Product and sum apart: done in one operation, the ends of a tensor may round otherwise than its middle.
            sum_TH += y_AH.index_select(0, places_TK[:, choice]) * weights_TK[:, choice, None]
        return sum_TH.to(y_AH.dtype)

    @staticmethod
    def backward(ctx: Any, dsum_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        y_AH, weights_TK = ctx.saved_tensors
        assignments: Assignments = ctx.assignments
        dsum_AH = dsum_TH.index_select(0, assignments.tokens_A)
        dweights_A = (dsum_AH * y_AH).sum(dim=1)
        weights_A = weights_TK.reshape(-1)[assignments.order_A]
        dy_AH = (dsum_AH * weights_A[:, None]).to(y_AH.dtype)
        return dy_AH, dweights_A[assignments.places_TK].to(weights_TK.dtype), None


class _GroupedLinear(torch.autograd.Function):
    """``y = x W_e^T`` for the rows of each expert ``e``, plus the low-rank update of each (expert, segment)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_AI: torch.Tensor,
        weight_EOI: torch.Tensor,
        products: PackedProducts,
        rows: Sequence[ExpertRows],
        pairs: Sequence[SegmentPair],
    ) -> torch.Tensor:
        y_AO = products.by_expert(x_AI, weight_EOI, rows)
        saved = products.add_updates(y_AO, x_AI, pairs)
        ctx.products, ctx.rows, ctx.pairs = products, rows, pairs
        ctx.save_for_backward(x_AI, weight_EOI, *saved)
        return y_AO

    @staticmethod
    def backward(ctx: Any, dy_AO: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x_AI, weight_EOI, *saved = ctx.saved_tensors
        dx_AI = ctx.products.by_expert(dy_AO, weight_EOI.transpose(1, 2), ctx.rows)
        ctx.products.add_update_gradients(dy_TO=dy_AO, dx_TI=dx_AI, x_TI=x_AI, saved=saved, pairs=ctx.pairs)
        return dx_AI, None, None, None, None


class LoraExperts(torch.nn.Module):
    """Stands in for a frozen module of fused experts and applies the routed adapters."""

    def __init__(self, base: Any, path: str, form: ExpertForm, route: Route, products: PackedProducts) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.form = form
        self._route = route
        self._products = products

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send tokens [.., H] to the experts [T, K] chosen for them and add up what these return, weighted [T, K]."""
        first, last = self.form.names
        assignments = Assignments(top_k_index, self.base.get_parameter(first).shape[0])
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        x_AH = _Dispatch.apply(x_TH, assignments)
        if self.form.scales_input:
            x_AH = x_AH * top_k_weights.reshape(-1)[assignments.order_A, None]
            top_k_weights = torch.ones_like(top_k_weights)
        between_AM = self.form.between(self.base, self._project(x_AH, first, assignments))
        y_AH = self._project(between_AM, last, assignments)
        y_TH: torch.Tensor = _Combine.apply(y_AH, top_k_weights, assignments)
        return y_TH.view(hidden_states.shape)

    def _project(self, x_AI: torch.Tensor, name: str, assignments: Assignments) -> torch.Tensor:
        pairs = assignments.split(tuple(self._route.pairs(f"{self.path}.{name}")))
        weight_EOI = self.form.weight(self.base, name)
        y_AO: torch.Tensor = _GroupedLinear.apply(x_AI, weight_EOI, self._products, assignments.experts(), pairs)
        bias_EO = self.form.bias(self.base, name)
        return y_AO if bias_EO is None else y_AO + bias_EO.index_select(0, assignments.experts_A)
