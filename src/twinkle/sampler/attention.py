"""Attention of a packed pass over the sequences' caches: one call per piece, so no arithmetic is shared between pieces.

Shape suffixes: H query heads, G key-value heads, R query heads per key-value head, T packed tokens,
N tokens of a piece, S tokens of the sequence so far, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from twinkle.module.packed_attention import window_mask
from twinkle.sampler.kv_cache import SequenceCache


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence, ``start`` being the position of the first."""

    cache: SequenceCache
    start: int
    num_tokens: int


class CachedAttention:
    """Writes each piece's keys and values into its cache, then attends causally to all the cache holds.

    Pieces are computed in order, so a later piece of the same sequence sees the earlier ones.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self._pieces = pieces
        self._device = device
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}

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
        """Returns the attended values [1, T, H, D]; ``window`` None means no limit."""
        _, num_heads, num_tokens, head_size = query_1HTD.shape
        output_1THD = query_1HTD.new_empty(1, num_tokens, num_heads, head_size)
        row = 0
        for piece, mask_NS in zip(self._pieces, self._masks_of(window), strict=True):
            rows = slice(row, row + piece.num_tokens)
            row = rows.stop
            key_1GSD, value_1GSD = piece.cache.write(
                layer_index, piece.start, key_1GTD[:, :, rows], value_1GTD[:, :, rows]
            )
            first_key = _first_key(piece, window)
            key_1GSD, value_1GSD = key_1GSD[:, :, first_key:], value_1GSD[:, :, first_key:]
            query_1HND = query_1HTD[:, :, rows]
            if piece.num_tokens == 1:
                output_1THD[:, rows] = _attend_one(query_1HND, key_1GSD, value_1GSD, scale)
            else:
                output_1THD[:, rows] = _attend_chunk(query_1HND, key_1GSD, value_1GSD, mask_NS, scale)
        return output_1THD

    def _masks_of(self, window: int | None) -> list[torch.Tensor | None]:
        if window not in self._masks:
            self._masks[window] = [_mask(piece, window, self._device) for piece in self._pieces]
        return self._masks[window]


def _first_key(piece: Piece, window: int | None) -> int:
    """The first position that any token of the piece sees."""
    return 0 if window is None else max(0, piece.start - window + 1)


def _mask(piece: Piece, window: int | None, device: torch.device) -> torch.Tensor | None:
    """A single token sees all keys it is given, and a first chunk within its window is plainly causal: no mask."""
    end = piece.start + piece.num_tokens
    if piece.num_tokens == 1 or (piece.start == 0 and (window is None or end <= window)):
        return None
    return window_mask(piece.start, end, _first_key(piece, window), window, device)


def _attend_one(q_1H1D: torch.Tensor, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor, scale: float) -> torch.Tensor:
    """The query heads that share a key-value head become its rows: keys and values are read once, not repeated."""
    num_heads, head_size = q_1H1D.shape[1], q_1H1D.shape[3]
    q_1GRD = q_1H1D.reshape(1, k_1GSD.shape[1], -1, head_size)
    out_1GRD = functional.scaled_dot_product_attention(q_1GRD, k_1GSD, v_1GSD, scale=scale)
    return out_1GRD.reshape(1, 1, num_heads, head_size)


def _attend_chunk(
    q_1HND: torch.Tensor, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor, mask_NS: torch.Tensor | None, scale: float
) -> torch.Tensor:
    out_1HND = functional.scaled_dot_product_attention(
        q_1HND,
        k_1GSD,
        v_1GSD,
        attn_mask=mask_NS,
        is_causal=mask_NS is None,
        scale=scale,
        enable_gqa=q_1HND.shape[1] != k_1GSD.shape[1],
    )
    return out_1HND.transpose(1, 2)
