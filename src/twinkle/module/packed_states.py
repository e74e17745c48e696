"""What a layer with a memory carries along a sequence, and where it begins and ends in a packed row.

Some layers remember: a short convolution looks back at the last few tokens, a recurrence has a state. In a packed row
both start anew with every sequence. Where they come from and where they go is, like attention, an object that travels
with the forward call: training starts from nothing and keeps nothing, the sampler goes on from its caches.

Shapes: T packed tokens, S spans, L tokens of a chunk, N chunks, C channels of a convolution, K its taps,
P = K - 1 tokens it looks back at, G such tokens of all spans that go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from twinkle.infra.sending import send

Span = tuple[int, int]


class LayerState(NamedTuple):
    """What one layer remembers of one sequence; never changed in place, so that sequences may share it.

    ``past`` are the last inputs of its convolution [P, C] (zeros where the sequence was shorter), ``state`` that of its
    recurrence.
    """

    past: torch.Tensor
    state: torch.Tensor


class PackedStates:
    """The spans of a packed row, and what layers remember before and after each; here nothing, as in training."""

    keeps = False
    """Whether what is remembered after a span is wanted."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self._groups: list[SpanGroup] = []
        self._lookbacks: dict[tuple[tuple[bool, ...], int], Lookback] = {}
        self._places: torch.Tensor | None = None

    def before(self, layer_index: int) -> Sequence[LayerState | None]:
        """What the layer remembers of each span's sequence; None where it begins."""
        return [None] * len(self.spans)

    def keep(self, layer_index: int, states: Sequence[LayerState]) -> None:
        """Take what the layer remembers after each span."""
        raise NotImplementedError("nothing is kept of these spans; see keeps")

    def groups(self, device: torch.device) -> Sequence[SpanGroup]:
        """The spans by how they are computed; laid out once for all layers of a pass."""
        if not self._groups:
            tokens = [number for number, (start, end) in enumerate(self.spans) if self.keeps and end - start == 1]
            others = sorted(set(range(len(self.spans))) - set(tokens))
            kinds = [(numbers, are_tokens) for numbers, are_tokens in ((others, False), (tokens, True)) if numbers]
            self._groups = [
                SpanGroup(numbers, self.spans, device, are_tokens=are_tokens, is_all=len(kinds) == 1)
                for numbers, are_tokens in kinds
            ]
        return self._groups

    def lookback(self, going_on: tuple[bool, ...], num_past: int, device: torch.device) -> Lookback:
        """What is seen of the past of the spans that go on; laid out once like the chunks."""
        if (going_on, num_past) not in self._lookbacks:
            self._lookbacks[going_on, num_past] = Lookback(self.spans, going_on, num_past, device)
        return self._lookbacks[going_on, num_past]

    def places(self, device: torch.device) -> torch.Tensor:
        """For each packed token [T], which token of its span it is."""
        if self._places is None:
            places = np.concatenate([np.arange(end - start) for start, end in self.spans])
            self._places = send(places, torch.int64, device)
        return self._places


class SpanGroup:
    """Spans that are computed alike: single tokens that go on from a state, or all others.

    ``rows`` are theirs of the packed row, None for all of them.
    """

    def __init__(
        self, numbers: Sequence[int], spans: Sequence[Span], device: torch.device, *, are_tokens: bool, is_all: bool
    ) -> None:
        self.numbers = numbers
        self.are_tokens = are_tokens
        self._spans = [spans[number] for number in numbers]
        rows = np.concatenate([np.arange(start, end) for start, end in self._spans])
        self.rows = None if is_all else send(rows, torch.int64, device)
        self._device = device
        self._chunks: dict[int, SpanChunks] = {}

    def chunks(self, num_tokens: int) -> SpanChunks:
        """The spans cut into chunks of ``num_tokens``."""
        if num_tokens not in self._chunks:
            self._chunks[num_tokens] = SpanChunks(self._spans, num_tokens, self._device)
        return self._chunks[num_tokens]


class SpanChunks:
    """Spans cut into chunks of one length, each span's grid beginning with it; the last chunk is filled up with zeros.

    Chunks are laid out step by step: first those every span begins with, then the second ones, the longest span first.
    So a recurrence goes over them in as many steps as the longest span has chunks, and each step is one product over
    fixed shapes for all spans that are still under way.
    """

    def __init__(self, spans: Sequence[Span], num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        lengths = np.array([end - start for start, end in spans])
        starts = np.array(list(accumulate(lengths.tolist(), initial=0)))[:-1]
        totals = -(-lengths // num_tokens)
        order = np.argsort(-totals, kind="stable")
        self.order_S = send(order, torch.int64, device)
        """The spans in the order in which they stand in every step."""
        self.places_S = send(np.argsort(order), torch.int64, device)
        """Where each span stands in that order."""
        self.counts = [int((totals > step).sum()) for step in range(int(totals.max()))]
        """How many spans are under way in each step."""
        num_rows = int(lengths.sum())
        rows = [
            np.where(offsets < lengths[span], starts[span] + offsets, num_rows)
            for step, count in enumerate(self.counts)
            for offsets in [np.arange(step * num_tokens, (step + 1) * num_tokens)]
            for span in order[:count]
        ]
        cells = np.concatenate(rows)
        places = np.empty(num_rows + 1, dtype=np.int64)
        places[cells] = np.arange(cells.size)
        self.bounds = send(np.append(starts, num_rows), torch.int64, device)
        """Where the spans begin, and where the last one ends [S + 1], counted from the first."""
        self._cells = send(cells, torch.int64, device)
        self._places_T = send(places[:num_rows], torch.int64, device)

    def cut(self, x_T: torch.Tensor) -> torch.Tensor:
        """Rows [T, ..] as chunks [number of chunks, L, ..]."""
        cells: torch.Tensor = _Rows.apply(x_T, self._cells, self._places_T)
        return cells.unflatten(0, (-1, self.num_tokens))

    def join(self, x_NL: torch.Tensor) -> torch.Tensor:
        """Chunks [number of chunks, L, ..] as rows [T, ..]."""
        rows: torch.Tensor = _Rows.apply(x_NL.flatten(0, 1), self._places_T, self._cells)
        return rows

    def steps(self, x_N: torch.Tensor) -> Sequence[torch.Tensor]:
        """What belongs to each step of something that is laid out as chunks are."""
        return x_N.split(self.counts)

    def ended(self) -> Iterator[int]:
        """How many spans end with each step: the last so many of those under way."""
        for count, following in zip(self.counts, [*self.counts[1:], 0], strict=True):
            yield count - following


class _Rows(torch.autograd.Function):
    """Rows by their indices, zeros for the index after the last. ``back`` says where each came to lie.

    The gradient is looked up as well, not added up: there is one place for each row.
    """

    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, indices: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.indices, ctx.back = indices, back
        return _look_up(x_T, indices)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _look_up(dy, ctx.back), None, None


def _look_up(x_T: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    padding = (0, 0) * (x_T.dim() - 1) + (0, 1)
    return functional.pad(x_T, padding).index_select(0, indices)


class Lookback:
    """Which rows from before the spans that go on are seen from within them, and which rows the next ones will see.

    Args:
        spans: Of the packed row.
        going_on: Whether there is anything before each.
        num_past: How far a row sees.
        device: Where the rows are.
    """

    def __init__(self, spans: Sequence[Span], going_on: Sequence[bool], num_past: int, device: torch.device) -> None:
        num_rows = sum(end - start for start, end in spans)
        self._none = num_rows + num_past * sum(going_on)
        firsts = list(accumulate((num_past * is_on for is_on in going_on), initial=num_rows))
        after = [
            self._source(offset, span, first if is_on else None, num_past)
            for span, first, is_on in zip(spans, firsts, going_on, strict=False)
            for offset in range(span[1] - span[0] - num_past, span[1] - span[0])
        ]
        self._after = send(after, torch.int64, device)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shift in range(1, num_past + 1):
            pairs = [
                (start + offset, first - num_rows + num_past + offset - shift)
                for (start, end), first, is_on in zip(spans, firsts, going_on, strict=False)
                if is_on
                for offset in range(min(shift, end - start))
            ]
            self._seen.append(
                (
                    send([row for row, _ in pairs], torch.int64, device),
                    send([source for _, source in pairs], torch.int64, device),
                )
            )

    def _source(self, offset: int, span: Span, first: int | None, num_past: int) -> int:
        if offset >= 0:
            return span[0] + offset
        return self._none if first is None else first + num_past + offset

    def fill(self, before_TC: torch.Tensor, past_GC: torch.Tensor, shift: int) -> None:
        """Write the rows of the past that are seen ``shift`` places on to where they are seen."""
        rows, sources = self._seen[shift - 1]
        before_TC.index_copy_(0, rows, past_GC.index_select(0, sources))

    def after(self, x_TC: torch.Tensor, past_GC: torch.Tensor | None) -> torch.Tensor:
        """The last rows [S * P, C] of all spans, those before them included, zeros where there are none."""
        rows = [x_TC, x_TC.new_zeros(1, x_TC.shape[1])]
        if past_GC is not None:
            rows.insert(1, past_GC)
        return torch.cat(rows).index_select(0, self._after)


class Taps:
    """A causal convolution of each channel with its own few weights, which starts anew with every span.

    A sum of shifted products rather than a kernel that goes over time in blocks: the same bits wherever a span lies.

    Args:
        weight_CK: The frozen taps of each channel, the last one for the token itself.
        states: The spans of the row.
        past: What there was before each.
    """

    def __init__(self, weight_CK: torch.Tensor, states: PackedStates, past: Sequence[LayerState | None]) -> None:
        self._weight_CK = weight_CK
        self._num_past = weight_CK.shape[1] - 1
        self._states = states
        self._going_on = tuple(state is not None for state in past)
        rows = [state.past for state in past if state is not None]
        self._past_GC = torch.cat(rows) if rows else None

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """The convolved rows."""
        places_T = self._states.places(x_TC.device)
        past = None if self._past_GC is None else (self._lookback(x_TC.device), self._past_GC)
        y_TC: torch.Tensor = _CausalTaps.apply(x_TC, self._weight_CK, places_T, past)
        return y_TC

    def after(self, x_TC: torch.Tensor) -> Sequence[torch.Tensor]:
        """The last inputs of each span [P, C], to go on from."""
        rows_SPC = self._lookback(x_TC.device).after(x_TC, self._past_GC)
        return rows_SPC.view(len(self._going_on), self._num_past, -1).unbind(0)

    def _lookback(self, device: torch.device) -> Lookback:
        return self._states.lookback(self._going_on, self._num_past, device)


class _CausalTaps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TC: torch.Tensor,
        weight_CK: torch.Tensor,
        places_T: torch.Tensor,
        past: tuple[Lookback, torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.weight_CK, ctx.places_T = weight_CK, places_T
        y_TC = x_TC * weight_CK[:, -1]
        for shift in range(1, weight_CK.shape[1]):
            before_TC = _shifted(x_TC, places_T, shift)
            if past is not None:
                lookback, past_GC = past
                lookback.fill(before_TC, past_GC, shift)
            # Product and sum apart: done in one operation, the ends of a tensor may round otherwise than its middle.
            y_TC += before_TC * weight_CK[:, -1 - shift]
        return y_TC

    @staticmethod
    def backward(ctx: Any, dy_TC: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight_CK, places_T = ctx.weight_CK, ctx.places_T
        dx_TC = dy_TC * weight_CK[:, -1]
        for shift in range(1, weight_CK.shape[1]):
            # What a row gave to the one ``shift`` places on, if that is still in its span.
            after_TC = functional.pad(_masked(dy_TC, places_T, shift)[shift:], (0, 0, 0, min(shift, len(dy_TC))))
            dx_TC += after_TC * weight_CK[:, -1 - shift]
        return dx_TC, None, None, None


def _shifted(x_TC: torch.Tensor, places_T: torch.Tensor, shift: int) -> torch.Tensor:
    """The row ``shift`` places before each, zeros where that is not in its span."""
    length = x_TC.shape[0]
    before_TC = functional.pad(x_TC[: max(length - shift, 0)], (0, 0, min(shift, length), 0))
    return _masked(before_TC, places_T, shift)


def _masked(x_TC: torch.Tensor, places_T: torch.Tensor, shift: int) -> torch.Tensor:
    # Chosen, not multiplied by zero: what is left out may be NaN.
    return torch.where((places_T >= shift)[:, None], x_TC, 0.0)
