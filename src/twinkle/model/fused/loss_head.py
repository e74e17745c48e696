"""From hidden states to logprobs, losses and the gradient of the hidden states, without ever keeping ``[T, vocab]``.

One pass over the vocabulary: for a group of rows compute logits, read off the target logprobs, differentiate the loss
on that small vector alone, turn it into the gradient of the logits in place, multiply back. Rows are grouped over
datums, since rows of the frozen product are independent; everything an adapter sums over is cut at datum boundaries
and, within a datum, at fixed distances from its start.

Shapes: T packed tokens, n rows of a group, N tokens of a datum, K targets a token, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from twinkle.infra.sending import Parcel, fetch
from twinkle.model.fused import entropy
from twinkle.model.fused.logit_form import LogitForm
from twinkle.model.fused.loss_batches import LossBatch
from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.packed_products import LoopedProducts, LoopedUpdates, SegmentPair
from twinkle.module.row_product import RowProduct
from twinkle.module.segmented import Segment

PLAIN = LogitForm()
HEAD_BYTES = {"cpu": 128 << 20}
HEAD_BYTES_ACCELERATOR = 1 << 30
HEAD_ROWS_RANGE = (32, 4096)


def rows_per_group(device: torch.device, vocab_size: int) -> int:
    """How many rows of logits a device takes at once."""
    size_bytes = HEAD_BYTES.get(device.type, HEAD_BYTES_ACCELERATOR)
    low, high = HEAD_ROWS_RANGE
    return min(high, max(low, size_bytes // (4 * vocab_size)))


@dataclass(eq=False)
class HeadItem:
    """One datum in the head: which packed rows it has, whose they are, and its place in a batch of losses."""

    start: int
    end: int
    adapter: LoraAdapter
    gradient: Mapping[str, LoraPair] | None
    batch: LossBatch
    offset: int
    """Where its tokens begin in the batch."""
    candidates: torch.Tensor | None = None
    """(N, K): its targets, where a token has several."""
    wants_entropies: bool = False
    entropy_weights: torch.Tensor | None = None
    """(N,): minus the gradient of the loss by each token's entropy, where it has one."""
    entropies: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of one datum that go through the head at once; ``start`` and ``end`` count within the datum."""

    item: HeadItem
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.item.start + self.start, self.item.start + self.end)


@dataclass(eq=False)
class _Part:
    """The pieces of a group whose losses are computed at once, and where in the group each lies.

    ``start`` and ``end`` count the tokens of the batch.
    """

    batch: LossBatch
    start: int
    end: int
    pieces: list[_Piece] = field(default_factory=list)
    spans: list[slice] = field(default_factory=list)

    @property
    def is_scored(self) -> bool:
        """Whether its losses are known from before."""
        return self.batch.d_logprobs is not None


class LossHead:
    """The output projection of the base model with the adapters' updates of it."""

    def __init__(
        self,
        weight_VH: torch.Tensor,
        path: str,
        product: RowProduct,
        *,
        rows_per_group: int,
        form: LogitForm = PLAIN,
        sums_together: bool = False,
    ) -> None:
        self.weight_VH = weight_VH
        self.path = path
        # Logits are float32 everywhere, for which no device has grouped products.
        self.products = LoopedProducts(product)
        self.rows_per_group = rows_per_group
        self.form = form
        self.sums_together = sums_together
        """Whether gradients are summed over an adapter's datums at once, as its other layers do on an accelerator."""

    def logits(self, hidden_TH: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Float32 logits of the given rows; the segments count within these rows."""
        logits_TV = self.products.rows.in_float32(hidden_TH, self.weight_VH)
        LoopedUpdates(self.products, self._pairs(segments)).add(logits_TV, hidden_TH.float())
        return self.form.apply_(logits_TV)

    def _pairs(self, segments: Iterable[Segment]) -> Iterator[SegmentPair]:
        for segment in segments:
            adapter, gradient = segment.adapter, segment.gradient
            if adapter is not None and self.path in adapter.views:
                yield SegmentPair(
                    segment.start,
                    segment.end,
                    adapter.scales[self.path],
                    adapter.views[self.path],
                    None if gradient is None else gradient[self.path],
                )

    @torch.no_grad()
    def run(
        self,
        hidden_TH: torch.Tensor,
        targets_T: torch.Tensor,
        items: Sequence[HeadItem],
        d_hidden_TH: torch.Tensor | None,
    ) -> None:
        """Fill the batches of all items; with ``d_hidden_TH``, also the gradients of hidden states and adapters."""
        single_pass: list[HeadItem] = []
        for item in items:
            if item.batch.loss.separable or item.end - item.start <= self.rows_per_group:
                single_pass.append(item)
                continue
            self._score_whole(hidden_TH, targets_T, item)
            if d_hidden_TH is not None:
                single_pass.append(item)
        for group in self._groups(single_pass):
            self._run_group(hidden_TH, targets_T, group, d_hidden_TH)

    def _groups(self, items: Sequence[HeadItem]) -> Iterator[list[_Piece]]:
        group: list[_Piece] = []
        num_rows = 0
        for piece in self._pieces(items):
            if group and num_rows + piece.end - piece.start > self.rows_per_group:
                yield group
                group, num_rows = [], 0
            group.append(piece)
            num_rows += piece.end - piece.start
        if group:
            yield group

    def _pieces(self, items: Sequence[HeadItem]) -> Iterator[_Piece]:
        for item in items:
            length = item.end - item.start
            for start in range(0, length, self.rows_per_group):
                yield _Piece(item, start, min(start + self.rows_per_group, length))

    def _score_whole(self, hidden_TH: torch.Tensor, targets_T: torch.Tensor, item: HeadItem) -> None:
        scored: list[torch.Tensor] = []
        for piece in self._pieces([item]):
            logits_nV = self.logits(hidden_TH[piece.rows], [Segment(item.adapter, 0, piece.end - piece.start)])
            targets_n = targets_T[piece.rows]
            scored.append(_target_logprobs(torch.log_softmax(logits_nV, dim=-1), targets_n, piece))
        item.batch.d_logprobs = item.batch.evaluate(torch.cat(scored), 0, [item.end - item.start])

    def _run_group(
        self,
        hidden_TH: torch.Tensor,
        targets_T: torch.Tensor,
        group: Sequence[_Piece],
        d_hidden_TH: torch.Tensor | None,
    ) -> None:
        stretches = _merged(piece.rows for piece in group)
        hidden_nH = torch.cat([hidden_TH[rows] for rows in stretches])
        targets_n = _taken(targets_T, stretches)
        logits_nV = self.products.rows.in_float32(hidden_nH, self.weight_VH)
        spans = _spans(group)
        parts = _parts(group, spans)
        x_nH = hidden_nH.float()
        updates = LoopedUpdates(self.products, self._pairs(self._segments(group, spans)))
        saved = updates.add(logits_nV, x_nH)
        logits_nV = self.form.apply_(logits_nV)
        for piece, span in zip(group, spans, strict=True):
            if piece.item.wants_entropies:
                piece.item.entropies.append(entropy.entropies(logits_nV[span]))
        logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
        _count(logprobs_nV, targets_n, parts)
        d_logprobs = _lose(parts, _scored(logprobs_nV, targets_n, group, parts))
        if d_hidden_TH is None:
            return
        del logprobs_nV
        d_logits_nV = self._d_logits(logits_nV, targets_n, group, spans, parts, d_logprobs)
        del logits_nV
        d_rows_nH = self.products.rows.in_float32(d_logits_nV.to(self.weight_VH.dtype), self.weight_VH.t())
        updates.add_gradients(dy_TO=d_logits_nV, dx_TI=d_rows_nH, x_TI=x_nH, saved=saved)
        found = d_rows_nH.split([rows.stop - rows.start for rows in stretches])
        for rows, own_nH in zip(stretches, found, strict=True):
            d_hidden_TH[rows] = own_nH  # rounded, where hidden states are

    def _d_logits(
        self,
        logits_nV: torch.Tensor,
        targets_n: torch.Tensor,
        group: Sequence[_Piece],
        spans: Sequence[slice],
        parts: Sequence[_Part],
        d_logprobs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The gradient of the projected logits, given these as they are in form."""
        # Not exp(logprobs): that kernel's rounding of a value depends on where in the tensor it lies.
        d_logits_nV = torch.softmax(logits_nV, dim=-1)
        if _have_one_target(group):
            _add_targets_(d_logits_nV, targets_n[:, None], _in_order(parts, d_logprobs)[:, None])
        else:
            for part, gradient in zip(parts, d_logprobs, strict=True):
                own = gradient.split([_length(span) for span in part.spans])
                for piece, span, of_piece in zip(part.pieces, part.spans, own, strict=True):
                    gradient_nK = of_piece if of_piece.dim() == 2 else of_piece[:, None]
                    _add_targets_(d_logits_nV[span], _targets(piece, targets_n[span]), gradient_nK)
        for piece, span in zip(group, spans, strict=True):
            if piece.item.entropy_weights is not None:
                weights_n = piece.item.entropy_weights[piece.start : piece.end]
                entropy.add_gradient_(d_logits_nV[span], logits_nV[span], weights_n)
        slopes_nV = self.form.slopes(logits_nV)
        return d_logits_nV if slopes_nV is None else d_logits_nV.mul_(slopes_nV)

    def _segments(self, group: Sequence[_Piece], spans: Sequence[slice]) -> list[Segment]:
        """Whose rows these are; datum by datum, or all neighbours of one owner, where no bits are promised."""
        segments: list[Segment] = []
        for piece, span in zip(group, spans, strict=True):
            owner, gradient = piece.item.adapter, piece.item.gradient
            last = segments[-1] if segments and self.sums_together else None
            is_more = last is not None and last.adapter is owner and last.gradient is gradient
            start = segments.pop().start if is_more else span.start
            segments.append(Segment(owner, start, span.stop, gradient))
        return segments


def _merged(slices: Iterable[slice]) -> list[slice]:
    """Neighbours as one. Pieces need not be neighbours: a long datum scored beforehand leaves a hole."""
    merged: list[slice] = []
    for each in slices:
        is_next = bool(merged) and merged[-1].stop == each.start
        start = merged.pop().start if is_next else each.start
        merged.append(slice(start, each.stop))
    return merged


def _taken(values: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """These rows, copied only where they do not lie side by side."""
    return _whole([values[each] for each in slices])


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length


def _spans(group: Sequence[_Piece]) -> list[slice]:
    ends = list(accumulate(piece.end - piece.start for piece in group))
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _parts(group: Sequence[_Piece], spans: Sequence[slice]) -> list[_Part]:
    """A batch's pieces come in the order of its tokens, with none left out between two of a group."""
    parts: dict[LossBatch, _Part] = {}
    for piece, span in zip(group, spans, strict=True):
        item = piece.item
        start = item.offset + piece.start
        part = parts.setdefault(item.batch, _Part(item.batch, start, start))
        part.end = item.offset + piece.end
        part.pieces.append(piece)
        part.spans.append(span)
    return list(parts.values())


def _have_one_target(group: Sequence[_Piece]) -> bool:
    """Whether each token of a group has one, so that all of them are looked up at once."""
    return all(piece.item.candidates is None for piece in group)


def _targets(piece: _Piece, targets_n: torch.Tensor) -> torch.Tensor:
    """Those of a piece [n, K], given the first of each of its tokens."""
    candidates_NK = piece.item.candidates
    return targets_n[:, None] if candidates_NK is None else candidates_NK[piece.start : piece.end]


def _target_logprobs(logprobs_nV: torch.Tensor, targets_n: torch.Tensor, piece: _Piece) -> torch.Tensor:
    gathered_nK = logprobs_nV.gather(1, _targets(piece, targets_n))
    return gathered_nK[:, 0] if piece.item.candidates is None else gathered_nK


def _scored(
    logprobs_nV: torch.Tensor, targets_n: torch.Tensor, group: Sequence[_Piece], parts: Sequence[_Part]
) -> list[torch.Tensor]:
    """The logprobs of each part's targets, also of those that are scored."""
    if _have_one_target(group):
        found_n = logprobs_nV.gather(1, targets_n[:, None])[:, 0]
        return [_taken(found_n, _merged(part.spans)) for part in parts]
    return [
        _whole(
            [
                _target_logprobs(logprobs_nV[span], targets_n[span], piece)
                for piece, span in zip(part.pieces, part.spans, strict=True)
            ]
        )
        for part in parts
    ]


def _whole(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _count(logprobs_nV: torch.Tensor, targets_n: torch.Tensor, parts: Sequence[_Part]) -> None:
    """Find which tokens have the likeliest one as their target, of losses that want to be told."""
    is_best_n: torch.Tensor | None = None
    for part in parts:
        counted_n = part.batch.loss.counted(part.batch.inputs_of(part.start, part.end))
        if counted_n is not None:
            if is_best_n is None:
                is_best_n = logprobs_nV.argmax(dim=-1) == targets_n
            # In the dtype of all else that comes to the host, which waits once for each.
            part.batch.correct.append((_taken(is_best_n, _merged(part.spans)) & counted_n).float())


def _add_targets_(d_logits_nV: torch.Tensor, targets_nK: torch.Tensor, gradient_nK: torch.Tensor) -> None:
    """From probabilities to the logits' gradient, given that of the targets' logprobs."""
    d_logits_nV.mul_(-gradient_nK.sum(dim=1, keepdim=True))
    d_logits_nV.scatter_add_(1, targets_nK, gradient_nK)


def _lose(parts: Sequence[_Part], scored: list[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient of each part's losses by the logprobs of its targets."""
    on_host = [n for n, part in enumerate(parts) if part.batch.loss.is_on_host and not part.is_scored]
    device = scored[0].device
    # Waited for once for all clients' own losses, not once for each.
    for number, values in zip(on_host, fetch([scored[number] for number in on_host]), strict=True):
        scored[number] = torch.from_numpy(values)
    back = Parcel(sum(scored[number].numel() for number in on_host), torch.float32, device)
    found: list[torch.Tensor] = []
    for part, logprobs in zip(parts, scored, strict=True):
        if part.batch.d_logprobs is not None:
            found.append(part.batch.d_logprobs[part.start : part.end])
            continue
        gradient = part.batch.evaluate(logprobs, part.start, [_length(span) for span in part.spans])
        found.append(back.put(gradient.numpy()) if part.batch.loss.is_on_host else gradient)
    back.send()
    return found


def _in_order(parts: Sequence[_Part], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The gradients of all rows of a group (n,), in the order of the rows."""
    if len(parts) == 1:
        return gradients[0]
    of_spans: list[tuple[int, torch.Tensor]] = []
    for part, gradient in zip(parts, gradients, strict=True):
        spans = _merged(part.spans)
        own = gradient.split([_length(span) for span in spans])
        of_spans += zip((span.start for span in spans), own, strict=True)
    return torch.cat([own for _, own in sorted(of_spans, key=lambda each: each[0])])
