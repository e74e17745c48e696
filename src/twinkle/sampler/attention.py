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
        # What each single token needs is laid out for all of them at once; then few operations are left for each.
        query_T1GRD = _grouped_rows(query_1HTD, num_groups=key_1GTD.shape[1])
        kv_21GTD = torch.stack((key_1GTD, value_1GTD))
        attended = []
        row = 0
        for piece, mask_NS in zip(self._pieces, self._masks_of(window), strict=True):
            key_1GSD, value_1GSD = piece.cache.write(
                layer_index, piece.start, kv_21GTD.narrow(3, row, piece.num_tokens)
            )
            if first_key := _first_key(piece, window):
                key_1GSD, value_1GSD = key_1GSD[:, :, first_key:], value_1GSD[:, :, first_key:]
            if piece.num_tokens == 1:
                out_1GRD = functional.scaled_dot_product_attention(query_T1GRD[row], key_1GSD, value_1GSD, scale=scale)
                attended.append(out_1GRD.reshape(1, 1, query_1HTD.shape[1], -1))
            else:
                query_1HND = query_1HTD.narrow(2, row, piece.num_tokens)
                attended.append(_attend_chunk(query_1HND, key_1GSD, value_1GSD, mask_NS, scale))
            row += piece.num_tokens
        return torch.cat(attended, dim=1)

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


def _grouped_rows(query_1HTD: torch.Tensor, *, num_groups: int) -> torch.Tensor:
    """The query heads that share a key-value head become its rows: keys and values are read once, not repeated."""
    _, num_heads, num_tokens, head_size = query_1HTD.shape
    return query_1HTD[0].transpose(0, 1).reshape(num_tokens, 1, num_groups, num_heads // num_groups, head_size)


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
