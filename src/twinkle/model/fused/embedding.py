"""Embeddings of rows by the fused engine: the hidden state of each row's last token, and the way back from it.

A loss of embeddings compares rows, so it is computed between two runs: the first gives the embeddings, the second the
adapter's gradient for theirs.

Shapes: B rows, T packed tokens, N tokens of a row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import BatchTooLong, InvalidInput
from twinkle.core.slices import Slices, finished
from twinkle.infra.sending import send
from twinkle.model.forward_pass import ForwardPass
from twinkle.model.fused.job_run import all_finite
from twinkle.module.adapter import LoraPair
from twinkle.module.lora import LoraAdapter, Segment
from twinkle.module.packed_attention import CausalSpans, PackedAttention
from twinkle.processor import InputProcessor
from twinkle.processor.input_processor import IGNORED_LABEL
from twinkle.processor.media import refuse_media

Decode = Callable[[torch.Tensor, torch.Tensor, Sequence[Segment], PackedAttention], torch.Tensor]


class FusedEmbedding:
    """Packed passes of whole rows, about ``tokens_per_pass`` tokens each."""

    def __init__(
        self,
        inputs: Callable[[torch.Tensor], torch.Tensor],
        decode: Decode,
        *,
        tokens_per_pass: int,
        device: torch.device,
    ) -> None:
        self._inputs = inputs
        self._decode = decode
        self._tokens_per_pass = tokens_per_pass
        self._device = device

    def num_passes(self, rows: Sequence[torch.Tensor]) -> int:
        """How many passes the rows take, once through."""
        return sum(1 for _ in self._passes(rows))

    def embed(self, rows: Sequence[torch.Tensor], adapter: LoraAdapter) -> Slices[torch.Tensor]:
        """The embeddings (B, H) of token ids (N,), on the CPU in float32, a pass at a time."""
        parts_BH: list[torch.Tensor] = []
        for part in self._passes(rows):
            if parts_BH:
                yield
            parts_BH.append(self._embed_pass(part, adapter))
        return torch.cat(parts_BH)

    def add_gradient_to(
        self, total: torch.Tensor, rows: Sequence[torch.Tensor], adapter: LoraAdapter, gradient_BH: torch.Tensor
    ) -> Slices[None]:
        """Add the gradient of the rows' embeddings to a buffer of the adapter's layout, a pass at a time.

        Raises:
            InvalidInput: What was added is not finite.
        """
        views = adapter.layout.views(total)
        first = 0
        for part in self._passes(rows):
            if first:
                yield
            self._add_pass(part, adapter, views, gradient_BH[first : first + len(part)])
            first += len(part)
        if not all_finite([total])[0]:
            raise InvalidInput("inputs", "give a gradient that is not finite; nothing was applied")

    def _embed_pass(self, rows: Sequence[torch.Tensor], adapter: LoraAdapter) -> torch.Tensor:
        hidden_TH, ends = self._run(rows, adapter, None)
        return hidden_TH.index_select(0, ends).float().cpu()

    def _add_pass(
        self,
        rows: Sequence[torch.Tensor],
        adapter: LoraAdapter,
        views: Mapping[str, LoraPair],
        gradient_BH: torch.Tensor,
    ) -> None:
        hidden_TH, ends = self._run(rows, adapter, views)
        d_hidden_TH = torch.zeros_like(hidden_TH)
        d_hidden_TH.index_copy_(0, ends, send(gradient_BH.numpy(), torch.float32, self._device).to(d_hidden_TH.dtype))
        hidden_TH.backward(d_hidden_TH)

    def _passes(self, rows: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        start, num_tokens = 0, 0
        for index, row in enumerate(rows):
            if index > start and num_tokens + len(row) > self._tokens_per_pass:
                yield rows[start:index]
                start, num_tokens = index, 0
            num_tokens += len(row)
        yield rows[start:]

    def _run(
        self, rows: Sequence[torch.Tensor], adapter: LoraAdapter, gradient: Mapping[str, LoraPair] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (T, H), with a graph where there is a place for the gradient, and where the rows end."""
        ends = np.cumsum([len(row) for row in rows])
        spans = list(pairwise([0, *ends.tolist()]))
        tokens_T = send(torch.cat(list(rows)).numpy(), torch.int64, self._device)
        positions_T = send(np.concatenate([np.arange(len(row)) for row in rows]), torch.int64, self._device)
        segments = [Segment(adapter, start, end, gradient) for start, end in spans]
        with torch.set_grad_enabled(gradient is not None):
            embeddings_TH = self._inputs(tokens_T).detach()
            if gradient is not None:
                embeddings_TH.requires_grad_(True)
            return self._decode(embeddings_TH, positions_T, segments, CausalSpans(spans)), send(
                ends - 1, torch.int64, self._device
            )


@dataclass(frozen=True, eq=False)
class EmbeddedRows:
    """The second run of a pass over rows, for their gradient."""

    engine: FusedEmbedding
    adapter: LoraAdapter
    rows: Sequence[torch.Tensor]

    def backward(self, last: ForwardPass, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the gradient of the pass's loss; nothing here scales it."""
        self.add(self.gradient_of(last))

    def gradient_of(self, last: ForwardPass) -> torch.Tensor:
        """The gradient of the pass's loss, in the layout of the adapter's.

        Raises:
            InvalidInput: There is none, or it is not finite.
        """
        last.settle_loss()
        if last.gradients is None:
            raise InvalidInput("loss", "does not depend on the embeddings, so it has no gradient")
        total = torch.zeros_like(self.adapter.grad)
        finished(self.engine.add_gradient_to(total, self.rows, self.adapter, last.gradients["embeddings"]))
        return total

    def add(self, gradient: torch.Tensor) -> None:
        """Add it to the adapter's."""
        self.adapter.grad.add_(gradient)
        self.adapter.has_gradients = True


def embedding_pass(
    engine: FusedEmbedding,
    adapter: LoraAdapter,
    rows: Sequence[Mapping[str, Any]],
    processor: InputProcessor,
    loss_kwargs: Mapping[str, Any],
    *,
    is_training: bool,
    max_length: int,
    vocab_size: int,
) -> ForwardPass:
    """A pass whose outputs are ``embeddings`` (B, H); ``labels`` of any length go to the loss as they are.

    Raises:
        BatchTooLong: The rows hold more than ``max_length`` tokens.
        InvalidInput: A row has pictures, or a token that the model does not have.
    """
    sequences = processor.sequences(rows)
    tokens = [sequence.input_ids for sequence in sequences]
    num_tokens = sum(len(row) for row in tokens)
    if num_tokens > max_length:
        raise BatchTooLong(
            "inputs", f"hold {num_tokens} tokens, max_length is {max_length}; send fewer or shorter rows"
        )
    for index, sequence in enumerate(sequences):
        refuse_media(f"inputs[{index}]", sequence.media, "is a picture; this model embeds text, use TransformersModel")
        if int(sequence.input_ids.min()) < 0 or int(sequence.input_ids.max()) >= vocab_size:
            raise InvalidInput(f"inputs[{index}].input_ids", f"must be between 0 and {vocab_size - 1}")
    labels = [sequence.labels for sequence in sequences if sequence.labels is not None]
    if labels and len(labels) < len(sequences):
        raise InvalidInput("inputs", f"{len(labels)} of {len(sequences)} rows have labels; send all of them or none")
    embeddings_BH = finished(engine.embed(tokens, adapter))
    opened = ForwardPass(
        inputs={"labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)} if labels else {},
        outputs={"embeddings": embeddings_BH.requires_grad_(is_training)},
        is_training=is_training,
        tokens=tokens,
        loss_kwargs=loss_kwargs,
    )
    if is_training:
        opened.parts = EmbeddedRows(engine, adapter, tokens)
    return opened
