"""A layer of fused experts, each token in a few of them, each tenant with adapters of its own on every expert.

The tokens of a pass are sorted by expert. Products with an expert's frozen weight run over all its tokens at once,
their rows being independent (``row_product``); each (segment, expert) has its own small products, and within an expert
segments stay in the order they are packed in (``expert_rows``). What a token gets is summed over its experts in the
order the router names them, so no sum depends on the company.

Shapes: T packed tokens, K experts a token, A = T * K assignments of tokens to experts (sorted by expert, then by
token), E experts, H hidden size, I inputs, O outputs, M intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch

from twinkle.module.expert_forms import ExpertForm
from twinkle.module.expert_rows import Assignments
from twinkle.module.packed_products import LayerUpdates
from twinkle.module.segmented import Routing


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


class _ExpertLinear(torch.autograd.Function):
    """``y = x W_e^T`` for the rows of each expert ``e``, plus the low-rank update of each (expert, owner)."""

    @staticmethod
    def forward(
        ctx: Any, x_AI: torch.Tensor, weight_EOI: torch.Tensor, assignments: Assignments, updates: LayerUpdates
    ) -> torch.Tensor:
        y_AO = assignments.by_expert(x_AI, weight_EOI)
        saved = updates.add(y_AO, x_AI)
        ctx.assignments, ctx.updates = assignments, updates
        ctx.save_for_backward(x_AI, weight_EOI, *saved)
        return y_AO

    @staticmethod
    def backward(ctx: Any, dy_AO: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x_AI, weight_EOI, *saved = ctx.saved_tensors
        dx_AI = ctx.assignments.by_expert(dy_AO, weight_EOI.transpose(1, 2))
        ctx.updates.add_gradients(dy_TO=dy_AO, dx_TI=dx_AI, x_TI=x_AI, saved=saved)
        return dx_AI, None, None, None


class LoraExperts(torch.nn.Module):
    """Stands in for a frozen module of fused experts and applies the routed adapters."""

    def __init__(self, base: Any, path: str, form: ExpertForm, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.path = path
        self.form = form
        self._routing = routing

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send tokens [.., H] to the experts [T, K] chosen for them and add up what these return, weighted [T, K]."""
        first, last = self.form.names
        assignments = self._routing.now.assign(top_k_index, self.base.get_parameter(first).shape[0])
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
        weight_EOI = self.form.weight(self.base, name)
        updates = assignments.updates(f"{self.path}.{name}")
        y_AO: torch.Tensor = _ExpertLinear.apply(x_AI, weight_EOI, assignments, updates)
        bias_EO = self.form.bias(self.base, name)
        return y_AO if bias_EO is None else y_AO + bias_EO.index_select(0, assignments.experts_A)
