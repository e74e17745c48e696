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

import torch

from twinkle.core.errors import UserError
from twinkle.infra.sending import Parcel, fetch
from twinkle.loss import DatumLoss
from twinkle.loss.operation_work import OperationWork
from twinkle.model.fused import entropy
from twinkle.model.fused.logit_form import LogitForm
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
    """One datum in the head: which packed rows it has, its loss, and (filled by the head) what came out."""

    start: int
    end: int
    adapter: LoraAdapter
    gradient: Mapping[str, LoraPair] | None
    loss: DatumLoss
    targets: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    wants_entropies: bool = False
    entropy_weights: torch.Tensor | None = None
    """(N,): minus the gradient of the loss by each token's entropy, where it has one."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    correct: list[torch.Tensor] = field(default_factory=list)
    """Of how many counted tokens the target was the likeliest one, piece by piece, where the loss counts them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: UserError | None = None
    """Why a loss of the client's own could not be computed; the datum then has no gradient."""
    work: OperationWork | None = None
    """What the whole operation may take, where its loss is the client's own; ``spent`` of it is this datum's."""
    spent: int = 0
    d_logprobs: torch.Tensor | None = None
    """Known before the vocabulary pass only for a long datum whose loss needs the whole sequence."""

    @property
    def results(self) -> list[torch.Tensor]:
        """Its logprobs, its entropies if it has any, the losses of its pieces, and how many tokens each had right."""
        entropies = [torch.cat(self.entropies)] if self.entropies else []
        return [torch.cat(self.logprobs), *entropies, *self.losses, *self.correct]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows of one datum that go through the head at once; ``start`` and ``end`` count within the datum."""

    item: HeadItem
    start: int
    end: int

    @property
    def rows(self) -> slice:
        return slice(self.item.start + self.start, self.item.start + self.end)

    @property
    def inputs(self) -> Mapping[str, torch.Tensor]:
        if not self.item.loss.separable:
            return self.item.inputs
        return {name: values[self.start : self.end] for name, values in self.item.inputs.items()}

    @property
    def targets_nK(self) -> torch.Tensor:
        targets = self.item.targets[self.start : self.end]
        return targets if targets.dim() == 2 else targets[:, None]


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
    def run(self, hidden_TH: torch.Tensor, items: Sequence[HeadItem], d_hidden_TH: torch.Tensor | None) -> None:
        """Fill the outcome of every item; with ``d_hidden_TH``, also the gradients of hidden states and adapters."""
        single_pass: list[HeadItem] = []
        for item in items:
            if item.loss.separable or item.end - item.start <= self.rows_per_group:
                single_pass.append(item)
                continue
            self._score_whole(hidden_TH, item)
            if d_hidden_TH is not None:
                single_pass.append(item)
        for group in self._groups(single_pass):
            self._run_group(hidden_TH, group, d_hidden_TH)

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

    def _score_whole(self, hidden_TH: torch.Tensor, item: HeadItem) -> None:
        scored: list[torch.Tensor] = []
        for piece in self._pieces([item]):
            logits_nV = self.logits(hidden_TH[piece.rows], [Segment(item.adapter, 0, piece.end - piece.start)])
            scored.append(_target_logprobs(torch.log_softmax(logits_nV, dim=-1), piece))
        item.d_logprobs = _evaluate(item, torch.cat(scored), item.inputs)

    def _run_group(self, hidden_TH: torch.Tensor, group: Sequence[_Piece], d_hidden_TH: torch.Tensor | None) -> None:
        stretches = _stretches(group)
        hidden_nH = torch.cat([hidden_TH[rows] for rows in stretches])
        logits_nV = self.products.rows.in_float32(hidden_nH, self.weight_VH)
        spans = _spans(group)
        x_nH = hidden_nH.float()
        updates = LoopedUpdates(self.products, self._pairs(self._segments(group, spans)))
        saved = updates.add(logits_nV, x_nH)
        logits_nV = self.form.apply_(logits_nV)
        for piece, span in zip(group, spans, strict=True):
            if piece.item.wants_entropies:
                piece.item.entropies.append(entropy.entropies(logits_nV[span]))
        logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
        for piece, span in zip(group, spans, strict=True):
            counted_n = piece.item.loss.counted(piece.inputs)
            if counted_n is not None:
                is_best_n = logprobs_nV[span].argmax(dim=-1) == piece.targets_nK[:, 0]
                piece.item.correct.append((is_best_n & counted_n).sum())
        d_logprobs = _lose(group, _scored(logprobs_nV, group, spans))
        if d_hidden_TH is None:
            return
        del logprobs_nV
        d_logits_nV = self._d_logits(logits_nV, group, spans, d_logprobs)
        del logits_nV
        d_rows_nH = self.products.rows.in_float32(d_logits_nV.to(self.weight_VH.dtype), self.weight_VH.t())
        updates.add_gradients(dy_TO=d_logits_nV, dx_TI=d_rows_nH, x_TI=x_nH, saved=saved)
        found = d_rows_nH.split([rows.stop - rows.start for rows in stretches])
        for rows, own_nH in zip(stretches, found, strict=True):
            d_hidden_TH[rows] = own_nH  # rounded, where hidden states are

    def _d_logits(
        self,
        logits_nV: torch.Tensor,
        group: Sequence[_Piece],
        spans: Sequence[slice],
        d_logprobs: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The gradient of the projected logits, given these as they are in form."""
        # Not exp(logprobs): that kernel's rounding of a value depends on where in the tensor it lies.
        d_logits_nV = torch.softmax(logits_nV, dim=-1)
        if _have_one_target(group):
            _add_targets_(d_logits_nV, _targets_of(group), torch.cat(list(d_logprobs))[:, None])
        else:
            for piece, span, gradient in zip(group, spans, d_logprobs, strict=True):
                gradient_nK = gradient if gradient.dim() == 2 else gradient[:, None]
                _add_targets_(d_logits_nV[span], piece.targets_nK, gradient_nK)
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


def _stretches(group: Sequence[_Piece]) -> list[slice]:
    """The packed rows of a group. Pieces need not be neighbours: a long datum scored beforehand leaves a hole."""
    stretches: list[slice] = []
    for piece in group:
        is_next = bool(stretches) and stretches[-1].stop == piece.rows.start
        start = stretches.pop().start if is_next else piece.rows.start
        stretches.append(slice(start, piece.rows.stop))
    return stretches


def _have_one_target(group: Sequence[_Piece]) -> bool:
    """Whether each token of a group has one, so that all of them are looked up at once."""
    return all(piece.item.targets.dim() == 1 for piece in group)


def _targets_of(group: Sequence[_Piece]) -> torch.Tensor:
    return torch.cat([piece.targets_nK for piece in group])


def _scored(logprobs_nV: torch.Tensor, group: Sequence[_Piece], spans: Sequence[slice]) -> dict[_Piece, torch.Tensor]:
    """The logprobs of each piece's targets; of those scored beforehand none."""
    if _have_one_target(group):
        found = logprobs_nV.gather(1, _targets_of(group))[:, 0].split([span.stop - span.start for span in spans])
    else:
        found = tuple(_target_logprobs(logprobs_nV[span], piece) for piece, span in zip(group, spans, strict=True))
    return {piece: own for piece, own in zip(group, found, strict=True) if piece.item.d_logprobs is None}


def _add_targets_(d_logits_nV: torch.Tensor, targets_nK: torch.Tensor, gradient_nK: torch.Tensor) -> None:
    """From probabilities to the logits' gradient, given that of the targets' logprobs."""
    d_logits_nV.mul_(-gradient_nK.sum(dim=1, keepdim=True))
    d_logits_nV.scatter_add_(1, targets_nK, gradient_nK)


def _lose(group: Sequence[_Piece], scored: dict[_Piece, torch.Tensor]) -> list[torch.Tensor]:
    """The gradient of each piece's loss by the logprobs of its targets."""
    on_host = [piece for piece in scored if piece.item.loss.is_on_host]
    # Waited for once for all clients' own losses, not once for each.
    for piece, values in zip(on_host, fetch([scored[piece] for piece in on_host]), strict=True):
        scored[piece] = torch.from_numpy(values)
    back = Parcel(sum(scored[piece].numel() for piece in on_host), torch.float32, group[0].item.targets.device)
    found: list[torch.Tensor] = []
    for piece in group:
        item = piece.item
        if piece not in scored:
            assert item.d_logprobs is not None
            found.append(item.d_logprobs[piece.start : piece.end])
            continue
        gradient = _evaluate(item, scored[piece], piece.inputs)
        found.append(back.put(gradient.numpy()) if item.loss.is_on_host else gradient)
    back.send()
    return found


def _spans(group: Sequence[_Piece]) -> list[slice]:
    spans: list[slice] = []
    offset = 0
    for piece in group:
        length = piece.end - piece.start
        spans.append(slice(offset, offset + length))
        offset += length
    return spans


def _target_logprobs(logprobs_nV: torch.Tensor, piece: _Piece) -> torch.Tensor:
    gathered_nK = logprobs_nV.gather(1, piece.targets_nK)
    return gathered_nK if piece.item.targets.dim() == 2 else gathered_nK[:, 0]


def _evaluate(item: HeadItem, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Add what the loss says of these rows to the datum's outcome; the gradient by their logprobs."""
    item.logprobs.append(logprobs)
    try:
        if item.work is not None and (refusal := item.work.refusal(item.work.spent)) is not None:
            raise refusal
        evaluation = item.loss.evaluate(logprobs, inputs)
    except UserError as error:
        item.failure = error
        return torch.zeros_like(logprobs)
    item.losses.append(evaluation.loss)
    item.metrics = evaluation.metrics
    item.spent = evaluation.work
    if item.work is not None:
        item.work.spent += evaluation.work
    return evaluation.d_logprobs
