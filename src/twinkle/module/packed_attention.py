"""Attention over packed sequences, registered with transformers under one name.

Which attention runs is an object that travels with the forward call as a keyword, not a global: training passes
``CausalSpans``, the sampler its own with a cache behind it.

Shapes: H query heads, G key/value heads, T packed tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "twinkle_packed"


class PackedAttention(Protocol):
    """Attends within each packed sequence."""

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]."""
        ...


class CausalSpans:
    """Causal attention within each ``(start, end)`` of the packed row, one call per sequence: no shared arithmetic."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = tuple(spans)

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]."""
        grouped = query_1HTD.shape[1] != key_1GTD.shape[1]
        attended = [
            functional.scaled_dot_product_attention(
                query_1HTD[:, :, start:end],
                key_1GTD[:, :, start:end],
                value_1GTD[:, :, start:end],
                is_causal=True,
                scale=scale,
                enable_gqa=grouped,
            ).transpose(1, 2)
            for start, end in self.spans
        ]
        return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0].contiguous()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    packed_attention: PackedAttention,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    return packed_attention(layer_index, query, key, value, scale=scaling), None


def _no_mask(*args: Any, **unused: Any) -> None:
    return None


def register_packed_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
