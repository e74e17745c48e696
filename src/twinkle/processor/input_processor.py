"""Rows of different lengths as one batch of tensors.

Shapes: B sequences, T positions of the longest, P packed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.processor.media import (
    BY_TOKEN,
    MEMBER_LENGTHS,
    PIXELS,
    RowPictures,
    batch_media,
    members_of,
    read_media,
    read_pictures,
)

IGNORED_LABEL = -100
PADDING = {"input_ids": 0, "attention_mask": 0, "position_ids": -1, "labels": IGNORED_LABEL}

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence of a row, padding and masked positions taken away; ``labels`` need not be as long.

    ``position_ids`` are [N], or [3, N] where pictures spread over rows and columns.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor | None
    pictures: RowPictures | None = None
    media: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """What a model gets (``model_inputs``), what a loss gets (``labels`` (B, T)), and the way between them."""

    model_inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    lengths: tuple[int, ...]
    is_packed: bool
    pads_left: bool
    label_lengths: tuple[int, ...] = ()
    """As many as labels; they need not be the sequences'."""
    largest_token: int = 0
    """Known without asking the device."""
    largest_label: int = IGNORED_LABEL

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Model output by position, (1, P, ...) if packed, as (B, T, ...) with zeros after the end of a sequence."""
        if not self.is_packed:
            return values
        return pad_sequence(list(values[0].split(self.lengths)), batch_first=True)

    def last_positions(self, values: torch.Tensor) -> torch.Tensor:
        """The value at the last token of each sequence, (B, ...)."""
        if self.pads_left and not self.is_packed:
            return values[:, -1]
        ends_B = torch.tensor(self.lengths, device=values.device) - 1
        rows_BT = self.unpack(values)
        return rows_BT[torch.arange(len(self.lengths), device=values.device), ends_B]


class InputProcessor:
    """Pads rows, or lays them in one row without padding; keys that no model takes are ignored.

    A row holds ``input_ids`` and perhaps ``labels``, ``attention_mask``, ``position_ids``, and what is of its pictures
    (``pixel_values`` with ``image_grid_thw`` or ``image_position_ids``, ``mm_token_type_ids``). Where position ids
    begin again, the row holds several sequences, which are taken apart: a loss sees one row for each sequence. A row
    with pictures is one sequence, unless ``member_lengths`` and ``member_pictures`` say where others lie in it; beside
    it rows of text alone are filled up.

    Args:
        device_mesh: Not used; rows are those of this rank already.
        padding_free: One row for all sequences, with position ids that begin again, in place of padding.
        framework: ``transformers`` or ``megatron``: rows are the same for both.
        padding_side: Where the padding goes.
        function: Makes other rows of the rows first, or takes a dict of padded values for rows.
        settings: Others are taken, and named in the log.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        padding_free: bool = False,
        framework: str = "transformers",
        padding_side: Literal["right", "left"] = "right",
        function: Callable[[Sequence[Row]], Sequence[Row] | Row] | None = None,
        **settings: object,
    ) -> None:
        known_keywords("InputProcessor", settings, ("device_mesh", "padding_free", "framework", "padding_side"))
        if framework not in ("transformers", "megatron"):
            raise InvalidInput("framework", f"is {framework!r}; send 'transformers' or 'megatron'")
        if padding_side not in ("right", "left"):
            raise InvalidInput("padding_side", f"is {padding_side!r}, must be 'right' or 'left'")
        self.device_mesh = device_mesh
        self.padding_free = padding_free
        self.padding_side = padding_side
        self.function = function

    def __call__(self, rows: Sequence[Row] | Row, device: torch.device | str = "cpu") -> ModelBatch:
        """The batch of ``rows``.

        Raises:
            InvalidInput: A row has no tokens, its fields differ in length, some rows have labels and others none, or
                rows with pictures are to be laid in one row.
        """
        sequences = self.sequences(rows)
        input_ids = [sequence.input_ids for sequence in sequences]
        lengths = tuple(len(ids) for ids in input_ids)
        positions = [sequence.position_ids for sequence in sequences]
        media = batch_media([sequence.media for sequence in sequences], lengths, self.padding_side)
        if self.padding_free:
            if media:
                raise InvalidInput("padding_free", f"takes no {', '.join(media)}; pad rows with pictures")
            inputs = {"input_ids": torch.cat(input_ids)[None], "position_ids": torch.cat(positions)[None]}
        else:
            inputs = {
                "input_ids": self._pad("input_ids", input_ids),
                "position_ids": self._padded_positions(positions),
                "attention_mask": self._pad("attention_mask", [torch.ones_like(ids) for ids in input_ids]),
                **media,
            }
        labels_BT = self._labels(sequences)
        labels = [sequence.labels for sequence in sequences if sequence.labels is not None]
        return ModelBatch(
            model_inputs={name: values.to(device) for name, values in inputs.items()},
            labels=None if labels_BT is None else labels_BT.to(device),
            lengths=lengths,
            is_packed=self.padding_free,
            pads_left=self.padding_side == "left",
            label_lengths=tuple(map(len, labels)),
            largest_token=int(torch.cat(input_ids).max()),
            largest_label=IGNORED_LABEL if labels_BT is None or not labels_BT.numel() else int(labels_BT.max()),
        )

    def sequences(self, rows: Sequence[Row] | Row) -> list[TokenSequence]:
        """The sequences of all rows, in order, without padding."""
        rows = [rows] if isinstance(rows, Mapping) else rows
        if not rows:
            raise InvalidInput("inputs", "is empty; send at least one row")
        if self.function is not None:
            made = self.function(rows)
            rows = _rows_of_batch(made) if isinstance(made, Mapping) else made
        return [sequence for index, row in enumerate(rows) for sequence in _sequences(f"inputs[{index}]", row)]

    def _labels(self, sequences: Sequence[TokenSequence]) -> torch.Tensor | None:
        labels = [sequence.labels for sequence in sequences if sequence.labels is not None]
        if not labels:
            return None
        if len(labels) < len(sequences):
            raise InvalidInput(
                "inputs", f"{len(labels)} of {len(sequences)} rows have labels; send them with all rows or with none"
            )
        return self._pad("labels", labels)

    def _padded_positions(self, positions: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, T), or (3, B, T) if a row has positions along three axes."""
        if all(of_row.dim() == 1 for of_row in positions):
            return self._pad("position_ids", positions)
        axes = [of_row.expand(3, -1) if of_row.dim() == 1 else of_row for of_row in positions]
        return torch.stack([self._pad("position_ids", [of_row[axis] for of_row in axes]) for axis in range(3)])

    def _pad(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        # A packed batch is unpacked to the right, whatever the side of padding.
        side = "right" if self.padding_free else self.padding_side
        return pad_sequence(list(values), batch_first=True, padding_value=PADDING[name], padding_side=side)


def _sequences(field: str, row: Row) -> list[TokenSequence]:
    if row.get(MEMBER_LENGTHS) is not None:
        return [sequence for member in members_of(field, row) for sequence in _sequences(field, member)]
    if "input_ids" not in row:
        raise InvalidInput(f"{field}.input_ids", "is missing; encode the row with a template first")
    input_ids = _integers(f"{field}.input_ids", row["input_ids"])
    if not len(input_ids):
        raise InvalidInput(f"{field}.input_ids", "is empty; send at least one token")
    position_ids = _positions(field, row, len(input_ids))
    media = read_media(field, row, len(input_ids))
    labels = None if row.get("labels") is None else _numbers(f"{field}.labels", row["labels"])
    mask = _optional(field, row, "attention_mask", len(input_ids))
    if mask is not None and not bool(mask.bool().all()):
        kept = mask.bool()
        labels = labels[kept] if labels is not None and len(labels) == len(kept) else labels
        position_ids = None if position_ids is None else position_ids[..., kept]
        media = {name: values[kept] if name in BY_TOKEN else values for name, values in media.items()}
        input_ids = input_ids[kept]
    if len(input_ids) and int(input_ids.min()) < 0:
        raise InvalidInput(f"{field}.input_ids", f"hold {int(input_ids.min())}, which is no token")
    if position_ids is None:
        position_ids = torch.arange(len(input_ids))
    pictures = read_pictures(field, media)
    if position_ids.dim() == 2 or not media.keys().isdisjoint(PIXELS):
        return [TokenSequence(input_ids, position_ids, labels, pictures, media)]
    starts = [0, *((position_ids[1:] == 0) & (position_ids[:-1] != -1)).nonzero().flatten().add(1).tolist()]
    if len(starts) == 1:
        return [TokenSequence(input_ids, position_ids, labels)]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], len(input_ids)], strict=True)]
    split = [None] * len(sizes) if labels is None else _split_labels(field, labels, sizes)
    return [
        TokenSequence(ids, positions, targets)
        for ids, positions, targets in zip(input_ids.split(sizes), position_ids.split(sizes), split, strict=True)
    ]


def _positions(field: str, row: Row, num_tokens: int) -> torch.Tensor | None:
    """[N], or [3, N] of a row whose template counts along three axes."""
    given = row.get("position_ids")
    if given is None:
        return None
    try:
        values = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return _optional(field, row, "position_ids", num_tokens)
    values = values.squeeze(1) if values.dim() == 3 and values.shape[1] == 1 else values
    if values.dim() != 2 or values.shape[0] != 3:
        return _optional(field, row, "position_ids", num_tokens)
    if values.shape[1] != num_tokens or values.is_floating_point():
        raise InvalidInput(
            f"{field}.position_ids", f"has shape {tuple(values.shape)}; send 3 integers for each of {num_tokens} tokens"
        )
    return values.to("cpu", torch.int64)


def _rows_of_batch(batch: Row) -> list[Row]:
    """The rows of padded values, all of which have a row for each of ``input_ids``."""
    if "input_ids" not in batch:
        raise InvalidInput("function", f"gave a dict of {', '.join(batch) or 'nothing'}; give input_ids, or rows")
    sizes = {name: len(values) for name, values in batch.items()}
    if len(set(sizes.values())) > 1:
        raise InvalidInput("function", f"gave values of {sizes} rows; give as many of each")
    return [{name: values[index] for name, values in batch.items()} for index in range(sizes["input_ids"])]


def _split_labels(field: str, labels: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    if len(labels) != sum(sizes):
        raise InvalidInput(f"{field}.labels", f"has {len(labels)} values for {sum(sizes)} tokens of a packed row")
    return list(labels.split(sizes))


def _optional(field: str, row: Row, name: str, num_tokens: int) -> torch.Tensor | None:
    if row.get(name) is None:
        return None
    values = _integers(f"{field}.{name}", row[name])
    if len(values) != num_tokens:
        raise InvalidInput(f"{field}.{name}", f"has {len(values)} values for {num_tokens} input_ids")
    return values


def _integers(field: str, values: Any) -> torch.Tensor:
    tensor = _numbers(field, values)
    if tensor.is_floating_point() and len(tensor):
        raise InvalidInput(field, f"has dtype {tensor.dtype}; send integers")
    return tensor.to(torch.int64)


def _numbers(field: str, values: Any) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(field, "must be a list, an array or a tensor of numbers") from error
    if tensor.dim() == 2 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise InvalidInput(field, f"has shape {tuple(tensor.shape)}; send one row of numbers")
    return tensor.cpu()
