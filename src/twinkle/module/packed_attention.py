"""Attention over packed sequences, registered with transformers under one name.

Which attention runs is an object that travels with the forward call as a keyword, not a global: training passes
``CausalSpans``, the sampler its own with a cache behind it. What a layer asks of it (a scale, a window, a cap, sinks)
is an ``AttentionForm``; ``scaled_attention`` computes it.

Shapes: H query heads, G key/value heads, T packed tokens, N queries, B those of a block, D head size,
S keys or sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twinkle.module.packed_states import PackedStates
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.varlen import PackedSequences, kernel_for

ATTENTION_NAME = "twinkle_packed"
QUERY_SCALE = "twinkle_query_scale"
"""What a layer is given that scales its queries by their positions [1, T]: their factors [1, T]."""


class SequenceRecords(NamedTuple):
    """What a layer keeps of each token of one sequence so far [S, R], ``start`` of them from before this pass."""

    start: int
    rows: torch.Tensor

    @property
    def num_new(self) -> int:
        """Tokens of this pass."""
        return len(self.rows) - self.start


class PackedAttention(Protocol):
    """Attends within each packed sequence, and knows what layers with a memory go on from."""

    @property
    def states(self) -> PackedStates:
        """Where the packed sequences lie, and what layers remember of them."""
        ...

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]."""
        ...

    def records(self, layer_index: int, records_TR: torch.Tensor) -> Sequence[SequenceRecords]:
        """For layers with attention of their own: keep something of each packed token, and return what is kept of each
        sequence.
        """
        ...


class CausalSpans:
    """Causal attention within each ``(start, end)`` of the packed row: no shared arithmetic.

    One call for all where the device has a kernel for it (``varlen``), else one per sequence, or per neighbours of one
    length as a batch. The spans cover the row, one after another. It is split into them, never sliced: the gradient of
    a slice is as large as what it was cut from, so that of all slices together would grow with their number times the
    row.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = tuple(spans)
        self.states = PackedStates(spans)
        self._sequences: PackedSequences | None = None

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Return the attended values as [1, T, H, D]."""
        lengths = [end - start for start, end in self.spans]
        kernel = kernel_for(query_1HTD, key_1GTD, form)
        if kernel is not None:
            if self._sequences is None:
                self._sequences = PackedSequences(lengths, query_1HTD.device)
            return self._sequences.attend(kernel, query_1HTD, key_1GTD, value_1GTD, form)
        runs = _runs_of(lengths, form)
        sizes = [number * length for number, length in runs]
        attended = [
            _attend_spans(query_1HND, key_1GND, value_1GND, form, number)
            for (number, _), query_1HND, key_1GND, value_1GND in zip(
                runs,
                query_1HTD.split(sizes, dim=2),
                key_1GTD.split(sizes, dim=2),
                value_1GTD.split(sizes, dim=2),
                strict=True,
            )
        ]
        return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0].contiguous()

    def records(self, layer_index: int, records_TR: torch.Tensor) -> Sequence[SequenceRecords]:
        """See :class:`PackedAttention`; every sequence is there from its beginning."""
        lengths = [end - start for start, end in self.spans]
        return [SequenceRecords(0, rows_SR) for rows_SR in records_TR.split(lengths)]


def _runs_of(lengths: Sequence[int], form: AttentionForm) -> list[tuple[int, int]]:
    """How many neighbours have which length; only those that are attended whole and plainly are put together."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length and _is_plain(length, form):
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def _is_plain(length: int, form: AttentionForm) -> bool:
    is_cut = length > (form.window or length) or length > (form.chunk or length)
    return not is_cut and form.cap is None and form.sinks is None


def _attend_spans(
    query_1HND: torch.Tensor, key_1GND: torch.Tensor, value_1GND: torch.Tensor, form: AttentionForm, number: int
) -> torch.Tensor:
    """The attended values [1, N, H, D] of so many sequences of one length, each for itself, in one call."""
    if number == 1:
        return _attend_span(query_1HND, key_1GND, value_1GND, form)
    query_SHND, key_SGND, value_SGND = (
        matrix.unflatten(2, (number, -1)).squeeze(0).transpose(0, 1) for matrix in (query_1HND, key_1GND, value_1GND)
    )
    return attend(query_SHND, key_SGND, value_SGND, form=form, is_causal=True).flatten(0, 1).unsqueeze(0)


def _attend_span(
    query_1HND: torch.Tensor, key_1GND: torch.Tensor, value_1GND: torch.Tensor, form: AttentionForm
) -> torch.Tensor:
    """The attended values [1, N, H, D] of one sequence, in blocks of a window (which see two) or of a chunk."""
    length = query_1HND.shape[2]
    step = form.window or form.chunk or length
    queries, keys, values = (matrix.split(step, dim=2) for matrix in (query_1HND, key_1GND, value_1GND))
    attended: list[torch.Tensor] = []
    for index, query_1HBD in enumerate(queries):
        start = index * step
        if start == 0 or form.window is None:
            attended.append(attend(query_1HBD, keys[index], values[index], form=form, is_causal=True))
            continue
        mask_NS = form.mask(start, start + query_1HBD.shape[2], start - step + 1, key_1GND.device)
        attended.append(
            attend(
                query_1HBD, _with_block_before(keys, index), _with_block_before(values, index), form=form, mask=mask_NS
            )
        )
    return torch.cat(attended, dim=1) if len(attended) > 1 else attended[0]


def _with_block_before(blocks_1GBD: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    """A block and the one before it but for its first token, which no query of the block sees."""
    return torch.cat((blocks_1GBD[index - 1][:, :, 1:], blocks_1GBD[index]), dim=2)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    packed_attention: PackedAttention,
    packed_positions: torch.Tensor,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    scale_of = getattr(module, QUERY_SCALE, None)
    if scale_of is not None:
        query = (query * scale_of(packed_positions)[:, None, :, None]).to(query.dtype)
    layer_index = module.layer_idx
    assert isinstance(layer_index, int)
    form = AttentionForm(scaling, window=sliding_window, cap=softcap, sinks=s_aux, chunk=_chunk_of(module))
    # Values may be narrower than keys (compressed attention); the fast kernels want one size.
    surplus = query.shape[-1] - value.shape[-1]
    attended = packed_attention(
        layer_index, query, key, functional.pad(value, (0, surplus)) if surplus else value, form=form
    )
    return attended[..., : value.shape[-1]], None


def _chunk_of(module: torch.nn.Module) -> int | None:
    """How wide the chunks are that the layer attends within, each by itself (Llama 4); its call does not say."""
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    return config.attention_chunk_size if kinds and kinds[module.layer_idx] == "chunked_attention" else None


def register_packed_attention() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; doing it again changes nothing.

    No masks are registered with it: transformers makes none then, and does not wait for positions to look at them.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
