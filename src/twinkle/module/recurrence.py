"""Recurrences over packed sequences, each from its own state: what they have in common, whatever they remember.

    S_t = exp(g_t) S_(t-1) + k_t outer u_t,   o_t = S_t^T q_t

with ``u_t`` the value of a token (Mamba-2) or what of it the state does not know yet (the gated delta rule). Computed
in chunks of 64 tokens counted from where a sequence begins: within a chunk by products of one fixed shape, from chunk
to chunk by the state. So the bits of a sequence depend neither on its company nor on where it was cut, if it was cut
between chunks.

Shapes: T packed tokens, S sequences, N chunks, L tokens of a chunk, H heads, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch.nn import functional

from twinkle.module.packed_states import LayerState, PackedStates, SpanChunks

CHUNK_TOKENS = 64

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerFunctions:
    """The elementwise functions of a layer; on the CPU such whose bits do not depend on the company."""

    exp: Elementwise = torch.exp
    sigmoid: Elementwise = torch.sigmoid
    silu: Elementwise = functional.silu
    softplus: Elementwise = functional.softplus


class TokenInputs(Protocol):
    """What a recurrence takes of each token."""

    @property
    def value(self) -> torch.Tensor:
        """[T, H, V]."""
        ...

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of the state of one sequence, [H, K, V]."""
        ...

    def rows(self, rows: torch.Tensor) -> Self:
        """Those of some tokens."""
        ...


Inputs = TypeVar("Inputs", bound=TokenInputs, contravariant=True)
Given = TypeVar("Given", bound=TokenInputs)


class Recurrence(Protocol[Inputs]):
    """A way to compute a recurrence."""

    def over_spans(
        self, inputs: Inputs, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What each token gets [T, H, V], and the states after each span if they are kept.

        ``before_SHKV`` None stands for zeros: all spans begin.
        """
        ...

    def over_tokens(self, inputs: Inputs, before_SHKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token more for each sequence: what it gets [S, H, V], and the states after it."""
        ...


def mix(
    rule: Recurrence[Given], inputs: Given, states: PackedStates, past: Sequence[LayerState | None]
) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
    """What each token gets [T, H, V], and the states after each span if they are kept."""
    groups = states.groups(inputs.value.device)
    if not states.keeps:
        (group,) = groups
        return rule.over_spans(inputs, group.chunks(CHUNK_TOKENS), None, keeps=False)[0], None
    zeros_HKV = torch.zeros(inputs.state_shape, device=inputs.value.device)
    out_THV = torch.empty_like(inputs.value)
    after: list[torch.Tensor] = [zeros_HKV] * len(past)
    for group in groups:
        rows = inputs if group.rows is None else inputs.rows(group.rows)
        before = (past[number] for number in group.numbers)
        before_SHKV = torch.stack([zeros_HKV if state is None else state.state for state in before])
        if group.are_tokens:
            group_THV, after_SHKV = rule.over_tokens(rows, before_SHKV)
            ends = after_SHKV.unbind(0)
        else:
            group_THV, kept = rule.over_spans(rows, group.chunks(CHUNK_TOKENS), before_SHKV, keeps=True)
            assert kept is not None, "asked for"
            # Apart: those of prompts stay for long, and a view would hold all the others.
            ends = tuple(state_HKV.clone() for state_HKV in kept)
        for number, state_HKV in zip(group.numbers, ends, strict=True):
            after[number] = state_HKV
        out_THV = group_THV if group.rows is None else out_THV.index_copy_(0, group.rows, group_THV)
    return out_THV, after


def state_bytes(num_values: int, convolution: torch.nn.Conv1d) -> int:
    """What a ``LayerState`` takes: values of a recurrence in float32, and the last inputs of its convolution."""
    (num_taps,) = convolution.kernel_size
    past_bytes = (num_taps - 1) * convolution.in_channels * convolution.weight.element_size()
    return num_values * torch.float32.itemsize + past_bytes


class PackedLayer(Protocol):
    """A layer that runs on packed rows."""

    @property
    def state_bytes(self) -> int:
        """What a ``LayerState`` of it takes."""
        ...


def pack_layers(
    model: torch.nn.Module,
    kinds: tuple[type[torch.nn.Module], ...],
    packed: Callable[[torch.nn.Module], PackedLayer],
) -> int:
    """Put packed layers in place of those of some kinds; the bytes that all of them remember of a sequence."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    size_bytes = 0
    for path, module in found:
        parent, _, name = path.rpartition(".")
        layer = packed(module)
        setattr(model.get_submodule(parent), name, layer)
        size_bytes += layer.state_bytes
    return size_bytes


class ChunkTerms(NamedTuple):
    """What the scan from chunk to chunk takes, laid out as the chunks are.

    New values [N, H, L, V], how keys read the state (None if values do not depend on it) and queries do [N, H, L, K]
    each, attention within the chunk [N, H, L, L], keys as they are written [N, H, L, K], and how much of the state
    stays [N, H, 1, 1].
    """

    new_values: torch.Tensor
    read: torch.Tensor | None
    query: torch.Tensor
    attention: torch.Tensor
    key: torch.Tensor
    decay: torch.Tensor


def scan(
    terms: ChunkTerms, chunks: SpanChunks, before_SHKV: torch.Tensor | None, *, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What each token gets [T, H, V], and the states after each span if they are kept."""
    state_SHKV = None if before_SHKV is None else before_SHKV.index_select(0, chunks.order_S)
    outputs, ended = _scan(terms, chunks, state_SHKV, keeps=keeps)
    out_THV = chunks.join(torch.cat(outputs).transpose(1, 2))
    if not keeps:
        return out_THV, None
    return out_THV, torch.cat(ended[::-1]).index_select(0, chunks.places_S)


def _scan(
    terms: ChunkTerms, chunks: SpanChunks, state_SHKV: torch.Tensor | None, *, keeps: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of every step, and the states of the spans that end with it."""
    outputs: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    last = len(chunks.counts) - 1
    none: Sequence[Any] = [None] * len(chunks.counts)
    by_step = zip(*(none if values is None else chunks.steps(values) for values in terms), chunks.ended(), strict=True)
    for step, (new_values, read, query, attention, key, decay, num_ended) in enumerate(by_step):
        if state_SHKV is None:
            values = new_values
            outputs.append(attention @ values)
        else:
            values = new_values if read is None else new_values - read @ state_SHKV
            outputs.append(query @ state_SHKV + attention @ values)
        if step == last and not keeps:
            break
        written = key.transpose(-1, -2) @ values
        state_SHKV = written if state_SHKV is None else state_SHKV * decay + written
        state_SHKV, done = state_SHKV.split((len(state_SHKV) - num_ended, num_ended))
        ended.append(done)
    return outputs, ended


def heads_first(chunks: SpanChunks, values_TH: torch.Tensor) -> torch.Tensor:
    """What belongs to each token and head [T, H, ..] as chunks in float32 [N, H, L, ..]."""
    return chunks.cut(values_TH.float()).transpose(1, 2).contiguous()


def decay_between(total_NHL: torch.Tensor, exp: Elementwise) -> torch.Tensor:
    """How much of what a token wrote is left at each later one of its chunk [N, H, L, L], from sums of decays."""
    length = total_NHL.shape[-1]
    later_LL = torch.ones(length, length, dtype=torch.bool, device=total_NHL.device).triu(1)
    return exp((total_NHL[..., :, None] - total_NHL[..., None, :]).masked_fill(later_LL, -torch.inf))
