"""The gated delta rule (arXiv 2412.06464) over packed sequences, each from its own state.

    S_t = exp(g_t) S_(t-1) + k_t outer (beta_t (v_t - exp(g_t) S_(t-1)^T k_t)),   o_t = S_t^T q_t

On the CPU it is computed in chunks of 64 tokens counted from where a sequence begins: within a chunk by products and a
triangular system of one fixed shape, from chunk to chunk by the state. So the bits of a sequence depend neither on its
company nor on where it was cut, if it was cut between chunks. On accelerators the same is done by the kernels of
``flash-linear-attention`` where it is installed.

Shapes: T packed tokens, S sequences, N chunks, L tokens of a chunk, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from twinkle.module.packed_states import SpanChunks

CHUNK_TOKENS = 64
NORM_EPSILON = 1e-6

Elementwise = Callable[[torch.Tensor], torch.Tensor]


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


class DeltaRule(Protocol):
    """A way to compute the rule."""

    def over_spans(
        self, inputs: DeltaInputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What each token gets [T, H, V], and the states after each span if they are kept.

        ``before_SHKV`` None stands for zeros: all spans begin.
        """
        ...

    def over_tokens(self, inputs: DeltaInputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token more for each sequence: what it gets [S, H, V], and the states after it."""
        ...


@dataclass(frozen=True)
class PlainDeltaRule:
    """The rule in float32, by products of fixed shapes; ``exp`` is one whose bits do not depend on the company."""

    exp: Elementwise = torch.exp

    def over_spans(
        self, inputs: DeltaInputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`DeltaRule`."""
        query_THK, key_THK = _normalised(inputs)
        query_NHLK, key_NHLK, value_NHLV = (
            chunks.cut(values.float()).transpose(1, 2).contiguous() for values in (query_THK, key_THK, inputs.value)
        )
        decay_NHL, beta_NHL = (
            chunks.cut(values.float()).transpose(1, 2).contiguous() for values in (inputs.decay, inputs.beta)
        )
        total_NHL = decay_NHL.cumsum(dim=-1)
        scanned = self._within_chunks(query_NHLK, key_NHLK, value_NHLV, beta_NHL, total_NHL)
        before = None if before_SHKV is None else before_SHKV[chunks.order]
        outputs, ended = _scan(scanned, chunks, before, keeps=keeps)
        out_NLHV = torch.cat(outputs).transpose(1, 2)
        out_THV = chunks.join(out_NLHV).to(inputs.value.dtype)
        if not keeps:
            return out_THV, None
        after_SHKV = torch.cat(ended[::-1])
        places = torch.empty(len(chunks.order), dtype=torch.int64)
        places[chunks.order] = torch.arange(len(chunks.order))
        return out_THV, after_SHKV[places.to(after_SHKV.device)]

    def _within_chunks(
        self,
        query_NHLK: torch.Tensor,
        key_NHLK: torch.Tensor,
        value_NHLV: torch.Tensor,
        beta_NHL: torch.Tensor,
        total_NHL: torch.Tensor,
    ) -> _Scanned:
        """All that does not need the state: see equations 8 to 10 of the paper, with the decay taken in."""
        length = query_NHLK.shape[2]
        later_LL = torch.ones(length, length, dtype=torch.bool, device=query_NHLK.device).triu(1)
        between_NHLL = self.exp((total_NHL[..., :, None] - total_NHL[..., None, :]).masked_fill(later_LL, -torch.inf))
        grown_NHL = self.exp(total_NHL)
        beta_key_NHLK = key_NHLK * beta_NHL[..., None]
        transposed_NHKL = key_NHLK.transpose(-1, -2)
        system_NHLL = (beta_key_NHLK @ transposed_NHKL) * between_NHLL
        # One system for both right sides: each column is solved by itself.
        right_sides = torch.cat((value_NHLV * beta_NHL[..., None], beta_key_NHLK * grown_NHL[..., None]), dim=-1)
        solved = torch.linalg.solve_triangular(system_NHLL, right_sides, upper=False, unitriangular=True)
        new_values_NHLV, read_NHLK = solved.split((value_NHLV.shape[-1], key_NHLK.shape[-1]), dim=-1)
        return _Scanned(
            new_values=new_values_NHLV,
            read=read_NHLK,
            query=query_NHLK * grown_NHL[..., None],
            attention=(query_NHLK @ transposed_NHKL) * between_NHLL,
            key=key_NHLK * self.exp(total_NHL[..., -1:] - total_NHL)[..., None],
            decay=grown_NHL[..., -1:, None],
        )

    def over_tokens(self, inputs: DeltaInputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`DeltaRule`."""
        query_SHK, key_SHK = _normalised(inputs)
        key_SHK1 = key_SHK[..., None]
        decayed_SHKV = before_SHKV * self.exp(inputs.decay.float())[..., None, None]
        known_SH1V = key_SHK[..., None, :] @ decayed_SHKV
        delta_SH1V = (inputs.value.float()[..., None, :] - known_SH1V) * inputs.beta.float()[..., None, None]
        after_SHKV = decayed_SHKV + key_SHK1 * delta_SH1V
        out_SHV = (query_SHK[..., None, :] @ after_SHKV)[..., 0, :]
        return out_SHV.to(inputs.value.dtype), after_SHKV


class _Scanned(NamedTuple):
    """What the scan from chunk to chunk takes, laid out as the chunks are.

    New values [N, H, L, V], how keys read the state and queries do [N, H, L, K] each, attention within the chunk
    [N, H, L, L], keys as they are written [N, H, L, K], and how much of the state stays [N, H, 1, 1].
    """

    new_values: torch.Tensor
    read: torch.Tensor
    query: torch.Tensor
    attention: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor


def _scan(
    scanned: _Scanned, chunks: SpanChunks, state_SHKV: torch.Tensor | None, *, keeps: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of every step, and the states of the spans that end with it."""
    outputs: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    last = len(chunks.counts) - 1
    by_step = zip(*(chunks.steps(values) for values in scanned), chunks.ended(), strict=True)
    for step, (new_values, read, query, attention, key, decay, num_ended) in enumerate(by_step):
        if state_SHKV is None:
            values = new_values
            outputs.append(attention @ values)
        else:
            values = new_values - read @ state_SHKV
            outputs.append(query @ state_SHKV + attention @ values)
        if step == last and not keeps:
            break
        written = key.transpose(-1, -2) @ values
        state_SHKV = written if state_SHKV is None else state_SHKV * decay + written
        state_SHKV, done = state_SHKV.split((len(state_SHKV) - num_ended, num_ended))
        ended.append(done)
    return outputs, ended


def _normalised(inputs: DeltaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    query_THK, key_THK = inputs.query.float(), inputs.key.float()
    size = query_THK.shape[-1]
    return _of_length_one(query_THK) * size**-0.5, _of_length_one(key_THK)


def _of_length_one(x_THK: torch.Tensor) -> torch.Tensor:
    return x_THK * torch.rsqrt((x_THK * x_THK).sum(dim=-1, keepdim=True) + NORM_EPSILON)
