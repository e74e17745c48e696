"""The state-space recurrence of Mamba-2 (arXiv 2405.21060) over packed sequences, each from its own state.

    S_t = exp(g_t) S_(t-1) + k_t outer v_t,   o_t = S_t^T q_t

with ``q`` and ``k`` the paper's C and B, ``v`` its x times the step, and ``g`` its A times the step. Computed chunk by
chunk (``recurrence``) on every device.

Shapes: T packed tokens, S sequences, N chunks, L tokens of a chunk, H heads, G groups of heads that share queries and
keys, K key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinkle.module.packed_states import SpanChunks
from twinkle.module.recurrence import ChunkTerms, Elementwise, decay_between, heads_first, scan


class SpaceInputs(NamedTuple):
    """What the recurrence takes of each token, in float32: [T, G, K] twice, [T, H, V], and ``g`` [T, H]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor

    def rows(self, rows: torch.Tensor) -> SpaceInputs:
        """Those of some tokens."""
        return SpaceInputs(*(values.index_select(0, rows) for values in self))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the state of one sequence."""
        return (self.value.shape[1], self.key.shape[2], self.value.shape[2])

    @property
    def heads_per_group(self) -> int:
        """How many heads share queries and keys."""
        return self.value.shape[1] // self.key.shape[1]


@dataclass(frozen=True)
class StateSpace:
    """The recurrence by products of fixed shapes; ``exp`` is one whose bits do not depend on the company."""

    exp: Elementwise = torch.exp

    def over_spans(
        self, inputs: SpaceInputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Recurrence`."""
        served = inputs.heads_per_group
        query_NGLK, key_NGLK = heads_first(chunks, inputs.query), heads_first(chunks, inputs.key)
        total_NHL = heads_first(chunks, inputs.decay).cumsum(dim=-1)
        scores_NHLL = (query_NGLK @ key_NGLK.transpose(-1, -2)).repeat_interleave(served, dim=1)
        query_NHLK, key_NHLK = (part.repeat_interleave(served, dim=1) for part in (query_NGLK, key_NGLK))
        grown_NHL = self.exp(total_NHL)
        terms = ChunkTerms(
            new_values=heads_first(chunks, inputs.value),
            read=None,
            query=query_NHLK * grown_NHL[..., None],
            attention=scores_NHLL * decay_between(total_NHL, self.exp),
            key=key_NHLK * self.exp(total_NHL[..., -1:] - total_NHL)[..., None],
            decay=grown_NHL[..., -1:, None],
        )
        return scan(terms, chunks, before_SHKV, keeps=keeps)

    def over_tokens(self, inputs: SpaceInputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Recurrence`."""
        query_SHK, key_SHK = (part.repeat_interleave(inputs.heads_per_group, dim=1) for part in inputs[:2])
        written_SHKV = key_SHK[..., None] * inputs.value[..., None, :]
        after_SHKV = before_SHKV * self.exp(inputs.decay)[..., None, None] + written_SHKV
        return (query_SHK[..., None, :] @ after_SHKV)[..., 0, :], after_SHKV
