"""Sequences one after another in one row, and which of its tokens a rank of context parallelism has.

With ``cp`` ranks every sequence is padded to 2 * cp blocks of one length, and rank r has blocks r and 2 * cp - 1 - r of
each (Megatron's own layout): so all ranks have as many keys to look at.

Shapes: T tokens of the whole row, N those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import lcm

import torch
from megatron.core.packed_seq_params import PackedSeqParams

Bounds = tuple[int, ...]
"""Where the padded sequences begin, and where the last one ends."""


@dataclass(frozen=True)
class PackedRow:
    """How the sequences of a micro-batch lie in one row.

    Args:
        lengths: Tokens of each sequence.
        bounds: Where they begin once padded; a last one of padding alone may follow.
        cp_size: Ranks that share each sequence.
        cp_rank: Which of them this one is.
    """

    lengths: tuple[int, ...]
    bounds: Bounds
    cp_size: int = 1
    cp_rank: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int], *, cp_size: int = 1, cp_rank: int = 0, tp_size: int = 1) -> PackedRow:
        """Sequences of some lengths; ``tp_size`` ranks split the rows of each rank evenly (sequence parallelism)."""
        step = 2 * cp_size if cp_size > 1 else 1
        padded = [-(-length // step) * step for length in lengths]
        surplus = -sum(padded) % lcm(step, cp_size * tp_size)
        bounds = tuple(accumulate([*padded, surplus] if surplus else padded, initial=0))
        return cls(tuple(lengths), bounds, cp_size, cp_rank)

    @property
    def num_tokens(self) -> int:
        """Of the whole row, padding included."""
        return self.bounds[-1]

    @cached_property
    def rows(self) -> torch.Tensor:
        """Which tokens of the whole row this rank has [N], in the order in which it has them."""
        return rows_of_rank(self.bounds, self.cp_size, self.cp_rank)

    def params(self, device: torch.device | str = "cpu") -> PackedSeqParams:
        """What Megatron's layers are told."""
        bounds = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        longest = max(end - start for start, end in pairwise(self.bounds))
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        )

    def place(self, values: Sequence[torch.Tensor], fill: float = 0) -> torch.Tensor:
        """One tensor [length, ..] for each sequence as the whole row [T, ..]."""
        first = values[0]
        row_T = first.new_full((self.num_tokens, *first.shape[1:]), fill)
        for start, value in zip(self.bounds, values, strict=False):
            row_T[start : start + len(value)] = value
        return row_T

    def own(self, row_T: torch.Tensor) -> torch.Tensor:
        """What this rank has of the whole row [N, ..]."""
        return row_T if self.cp_size == 1 else row_T.index_select(0, self.rows.to(row_T.device))

    def restore(self, row_T: torch.Tensor) -> list[torch.Tensor]:
        """The sequences [length, ..] of the whole row, without padding."""
        return [row_T[start : start + length] for start, length in zip(self.bounds, self.lengths, strict=False)]

    def gathered_order(self) -> torch.Tensor:
        """Where each token of the whole row lies [T] in what all ranks have, one rank's after the other's."""
        return gathered_order(self.bounds, self.cp_size)


@lru_cache(maxsize=64)
def rows_of_rank(bounds: Bounds, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Which tokens of the whole row a rank has [N]."""
    if cp_size == 1:
        return torch.arange(bounds[-1])
    blocks = [
        torch.arange(start + number * size, start + (number + 1) * size)
        for start, end in pairwise(bounds)
        for size in [(end - start) // (2 * cp_size)]
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank)
    ]
    return torch.cat(blocks)


@lru_cache(maxsize=64)
def gathered_order(bounds: Bounds, cp_size: int) -> torch.Tensor:
    """Where each token of the whole row lies [T] in what all ranks have, one rank's after the other's."""
    return torch.cat([rows_of_rank(bounds, cp_size, rank) for rank in range(cp_size)]).argsort()


def bounds_of(params: PackedSeqParams) -> Bounds:
    """Where the sequences of a packed row begin, as Megatron's layers are told."""
    bounds = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    return tuple(bounds.tolist())
