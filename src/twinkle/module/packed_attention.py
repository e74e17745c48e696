"""Attention over packed sequences, registered with transformers under one name.

Which attention runs is an object that travels with the forward call as a keyword, not a global: training passes
``CausalSpans``, the sampler its own with a cache behind it.

A layer may attend in a sliding window: a position then sees itself and the ``window - 1`` positions before it.

Shapes: H query heads, G key/value heads, T packed tokens, N queries, B those of a block, S keys, D head size.
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
        window: int | None,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]; ``window`` None means no limit."""
        ...


class CausalSpans:
    """Causal attention within each ``(start, end)`` of the packed row, one call per sequence: no shared arithmetic.

    The spans cover the row, one after another. It is split into them, never sliced: the gradient of a slice is as large
    as what it was cut from, so that of all slices together would grow with their number times the row.
    """

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
        window: int | None,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]; ``window`` None means no limit."""
        lengths = [end - start for start, end in self.spans]
        attended = [
            _attend_span(query_1HND, key_1GND, value_1GND, scale, window)
            for query_1HND, key_1GND, value_1GND in zip(
                query_1HTD.split(lengths, dim=2),
                key_1GTD.split(lengths, dim=2),
                value_1GTD.split(lengths, dim=2),
                strict=True,
            )
        ]
        return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0].contiguous()


def _attend_span(
    query_1HND: torch.Tensor, key_1GND: torch.Tensor, value_1GND: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """The attended values [1, N, H, D] of one sequence; long ones in blocks of a window, which see two windows each."""
    length = query_1HND.shape[2]
    grouped = query_1HND.shape[1] != key_1GND.shape[1]
    step = length if window is None else window
    queries, keys, values = (matrix.split(step, dim=2) for matrix in (query_1HND, key_1GND, value_1GND))
    attended: list[torch.Tensor] = []
    for index, query_1HBD in enumerate(queries):
        start = index * step
        first_key = max(0, start - step + 1)
        end = start + query_1HBD.shape[2]
        mask_NS = None if start == 0 else window_mask(start, end, first_key, window, key_1GND.device)
        attended.append(
            functional.scaled_dot_product_attention(
                query_1HBD,
                _with_block_before(keys, index),
                _with_block_before(values, index),
                attn_mask=mask_NS,
                is_causal=mask_NS is None,
                scale=scale,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )
    return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0]


def _with_block_before(blocks_1GBD: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """A block and the one before it but for its first token, which no query of the block sees."""
    if index == 0:
        return blocks_1GBD[0]
    return torch.cat((blocks_1GBD[index - 1][:, :, 1:], blocks_1GBD[index]), dim=2)


def window_mask(start: int, end: int, first_key: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which of the positions ``first_key:end`` (columns) the positions ``start:end`` (rows) see, as booleans [N, S]."""
    queries_N1 = torch.arange(start, end, device=device)[:, None]
    keys_S = torch.arange(first_key, end, device=device)
    seen_NS = keys_S <= queries_N1
    return seen_NS if window is None else seen_NS & (keys_S > queries_N1 - window)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    packed_attention: PackedAttention,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    return packed_attention(layer_index, query, key, value, scale=scaling, window=sliding_window), None


def _no_mask(*args: Any, **unused: Any) -> None:
    return None


def register_packed_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; doing it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _no_mask)
