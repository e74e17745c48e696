"""A batch of rows as sequences without padding, cut into micro-batches, and the way back.

Shapes: B rows, T positions of the longest, L those of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.processor import InputProcessor
from twinkle.processor.input_processor import IGNORED_LABEL
from twinkle.processor.media import PIXELS

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sequences:
    """The rows of a micro-batch: tokens and labels of each (L,)."""

    input_ids: tuple[torch.Tensor, ...]
    labels: tuple[torch.Tensor, ...] | None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self.input_ids]

    def part(self, start: int, end: int) -> Sequences:
        """Some of the rows."""
        return Sequences(self.input_ids[start:end], None if self.labels is None else self.labels[start:end])


@dataclass(frozen=True)
class RowBatch:
    """A batch as the loss sees it: ``labels`` (B, T), padded where the script's processor pads."""

    sequences: Sequences
    labels: torch.Tensor | None
    pads_left: bool

    @classmethod
    def of(
        cls, processor: InputProcessor, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], device: torch.device
    ) -> RowBatch:
        """The batch of rows.

        Raises:
            InvalidInput: They have pictures, or positions that do not count from 0.
        """
        batch = processor(rows, device=device)
        inputs = batch.model_inputs
        pictures = [name for name in PIXELS if name in inputs]
        if pictures:
            raise InvalidInput("inputs", f"have {pictures[0]}; MegatronModel takes text, use TransformersModel")
        pads_left = batch.pads_left and not batch.is_packed
        ids = _cut(inputs["input_ids"], batch.lengths, is_packed=batch.is_packed, pads_left=pads_left)
        positions = _cut(inputs["position_ids"], batch.lengths, is_packed=batch.is_packed, pads_left=pads_left)
        if any(not torch.equal(each, torch.arange(len(each), device=device)) for each in positions):
            raise InvalidInput("position_ids", "must count from 0 in each sequence; leave them out")
        labels_BT = batch.labels
        labels = None
        if labels_BT is not None:
            labels = _cut(labels_BT, batch.lengths, is_packed=False, pads_left=pads_left)
        return cls(Sequences(ids, labels), labels_BT, pads_left)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a loss gets beside the outputs."""
        return {} if self.labels is None else {"labels": self.labels}

    def parts(self, size: int, count: int) -> list[Sequences]:
        """``count`` micro-batches of up to ``size`` rows; beyond those there are, the first one again."""
        num_rows = len(self.sequences.input_ids)
        found = [self.sequences.part(start, start + size) for start in range(0, num_rows, size)]
        return found + found[:1] * (count - len(found))

    def padded(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values of each row (L, ..) as (B, T, ..), with zeros where there is padding."""
        width = max(self.sequences.lengths)
        found = rows[0].new_zeros(len(rows), width, *rows[0].shape[1:])
        places = [self._place(len(row), width) for row in rows]
        # By slices into one tensor: a loss's gradient flows back to each row.
        for index, (row, place) in enumerate(zip(rows, places, strict=True)):
            found[index, place] = row
        return found

    def row_values(self, values_BT: torch.Tensor, index: int) -> torch.Tensor:
        """What stands at the tokens of one row (L, ..)."""
        length = self.sequences.lengths[index]
        return values_BT[index, self._place(length, values_BT.shape[1])]

    def _place(self, length: int, width: int) -> slice:
        return slice(width - length, width) if self.pads_left else slice(0, length)


def _cut(values: torch.Tensor, lengths: Sequence[int], *, is_packed: bool, pads_left: bool) -> tuple[torch.Tensor, ...]:
    if is_packed:
        return tuple(values[0].split(list(lengths)))
    width = values.shape[1]
    return tuple(
        row[width - length :] if pads_left else row[:length] for row, length in zip(values, lengths, strict=True)
    )


def row_labels(sequences: Sequences) -> list[torch.Tensor]:
    """The labels of each row; ignored ones where there are none."""
    if sequences.labels is not None:
        return list(sequences.labels)
    return [torch.full_like(ids, IGNORED_LABEL) for ids in sequences.input_ids]
