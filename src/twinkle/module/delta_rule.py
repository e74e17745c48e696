"""The gated delta rule (arXiv 2412.06464) over packed sequences, each from its own state.

    S_t = exp(g_t) S_(t-1) + k_t outer (beta_t (v_t - exp(g_t) S_(t-1)^T k_t)),   o_t = S_t^T q_t

On the CPU it is computed chunk by chunk (``recurrence``), with a triangular system of one fixed shape for each. On
accelerators the same is done by the kernels of ``flash-linear-attention`` where it is installed.

Shapes: T packed tokens, S sequences, N chunks, L tokens of a chunk, H heads, K key size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinkle.module.packed_states import SpanChunks
from twinkle.module.recurrence import ChunkTerms, Elementwise, Recurrence, decay_between, heads_first, scan

NORM_EPSILON = 1e-6


class DeltaInputs(NamedTuple):
    """What the rule takes of each token: [T, H, K] twice, [T, H, V], and ``g`` and beta [T, H].

    Queries and keys are normalised by the rule itself.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor

    def rows(self, rows: torch.Tensor) -> DeltaInputs:
        """Those of some tokens."""
        return DeltaInputs(*(values.index_select(0, rows) for values in self))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the state of one sequence."""
        return (self.key.shape[1], self.key.shape[2], self.value.shape[2])


DeltaRule = Recurrence[DeltaInputs]


@dataclass(frozen=True)
class PlainDeltaRule:
    """The rule in float32, by products of fixed shapes; ``exp`` is one whose bits do not depend on the company."""

    exp: Elementwise = torch.exp

    def over_spans(
        self, inputs: DeltaInputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Recurrence`."""
        query_THK, key_THK = _normalised(inputs)
        terms = self._within_chunks(
            heads_first(chunks, query_THK),
            heads_first(chunks, key_THK),
            heads_first(chunks, inputs.value),
            heads_first(chunks, inputs.beta),
            heads_first(chunks, inputs.decay).cumsum(dim=-1),
        )
        out_THV, after_SHKV = scan(terms, chunks, before_SHKV, keeps=keeps)
        return out_THV.to(inputs.value.dtype), after_SHKV

    def _within_chunks(
        self,
        query_NHLK: torch.Tensor,
        key_NHLK: torch.Tensor,
        value_NHLV: torch.Tensor,
        beta_NHL: torch.Tensor,
        total_NHL: torch.Tensor,
    ) -> ChunkTerms:
        """All that does not need the state: see equations 8 to 10 of the paper, with the decay taken in."""
        between_NHLL = decay_between(total_NHL, self.exp)
        grown_NHL = self.exp(total_NHL)
        beta_key_NHLK = key_NHLK * beta_NHL[..., None]
        transposed_NHKL = key_NHLK.transpose(-1, -2)
        system_NHLL = (beta_key_NHLK @ transposed_NHKL) * between_NHLL
        # One system for both right sides: each column is solved by itself.
        right_sides = torch.cat((value_NHLV * beta_NHL[..., None], beta_key_NHLK * grown_NHL[..., None]), dim=-1)
        solved = torch.linalg.solve_triangular(system_NHLL, right_sides, upper=False, unitriangular=True)
        new_values_NHLV, read_NHLK = solved.split((value_NHLV.shape[-1], key_NHLK.shape[-1]), dim=-1)
        return ChunkTerms(
            new_values=new_values_NHLV,
            read=read_NHLK,
            query=query_NHLK * grown_NHL[..., None],
            attention=(query_NHLK @ transposed_NHKL) * between_NHLL,
            key=key_NHLK * self.exp(total_NHL[..., -1:] - total_NHL)[..., None],
            decay=grown_NHL[..., -1:, None],
        )

    def over_tokens(self, inputs: DeltaInputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Recurrence`."""
        query_SHK, key_SHK = _normalised(inputs)
        key_SHK1 = key_SHK[..., None]
        decayed_SHKV = before_SHKV * self.exp(inputs.decay.float())[..., None, None]
        known_SH1V = key_SHK[..., None, :] @ decayed_SHKV
        delta_SH1V = (inputs.value.float()[..., None, :] - known_SH1V) * inputs.beta.float()[..., None, None]
        after_SHKV = decayed_SHKV + key_SHK1 * delta_SH1V
        out_SHV = (query_SHK[..., None, :] @ after_SHKV)[..., 0, :]
        return out_SHV.to(inputs.value.dtype), after_SHKV


def _normalised(inputs: DeltaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    query_THK, key_THK = inputs.query.float(), inputs.key.float()
    size = query_THK.shape[-1]
    return _of_length_one(query_THK) * size**-0.5, _of_length_one(key_THK)


def _of_length_one(x_THK: torch.Tensor) -> torch.Tensor:
    return x_THK * torch.rsqrt((x_THK * x_THK).sum(dim=-1, keepdim=True) + NORM_EPSILON)
