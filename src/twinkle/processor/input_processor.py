"""Rows of different lengths as one batch of tensors.

Shapes: B sequences, T positions of the longest, P packed positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import InvalidInput

IGNORED_LABEL = -100
PADDING = {"input_ids": 0, "attention_mask": 0, "position_ids": -1, "labels": IGNORED_LABEL}

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RowPictures:
    """The pictures of a row, as an image processor gives them: patches [P, values] and each one's grid [B, 3]."""

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One sequence of a row, padding and masked positions taken away; ``labels`` need not be as long."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor | None
    pictures: RowPictures | None = None


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """What a model gets (``model_inputs``), what a loss gets (``labels`` (B, T)), and the way between them."""

    model_inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    lengths: tuple[int, ...]
    is_packed: bool
    pads_left: bool

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
    """Pads rows, or lays them in one row without padding; keys that no language model takes are ignored.

    A row holds ``input_ids`` and perhaps ``labels``, ``attention_mask``, ``position_ids``, ``pixel_values`` with
    ``image_grid_thw``. Where position ids begin again, the row holds several sequences, which are taken apart: a loss
    sees one row for each sequence. A row with pictures is one sequence.

    Args:
        device_mesh: Not used; rows are those of this rank already.
        padding_free: One row for all sequences, with position ids that begin again, in place of padding.
        framework: ``transformers`` is the only one.
        padding_side: Where the padding goes.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        padding_free: bool = False,
        framework: str = "transformers",
        padding_side: Literal["right", "left"] = "right",
    ) -> None:
        if framework != "transformers":
            raise InvalidInput("framework", f"is {framework!r}; only 'transformers' is supported")
        if padding_side not in ("right", "left"):
            raise InvalidInput("padding_side", f"is {padding_side!r}, must be 'right' or 'left'")
        self.device_mesh = device_mesh
        self.padding_free = padding_free
        self.padding_side = padding_side

    def __call__(self, rows: Sequence[Row] | Row, device: torch.device | str = "cpu") -> ModelBatch:
        """The batch of ``rows``.

        Raises:
            InvalidInput: A row has no tokens, its fields differ in length, some rows have labels and others none, or
                one has pictures.
        """
        sequences = self.sequences(rows)
        if any(sequence.pictures is not None for sequence in sequences):
            raise InvalidInput("inputs", "have pixel_values; of pictures, MultiLoraTransformersModel trains adapters")
        columns = {
            "input_ids": [sequence.input_ids for sequence in sequences],
            "position_ids": [sequence.position_ids for sequence in sequences],
        }
        lengths = tuple(len(ids) for ids in columns["input_ids"])
        if self.padding_free:
            inputs = {name: torch.cat(values)[None].to(device) for name, values in columns.items()}
        else:
            columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
            inputs = {name: self._pad(name, values).to(device) for name, values in columns.items()}
        labels_BT = self._labels(sequences)
        return ModelBatch(
            model_inputs=inputs,
            labels=None if labels_BT is None else labels_BT.to(device),
            lengths=lengths,
            is_packed=self.padding_free,
            pads_left=self.padding_side == "left",
        )

    def sequences(self, rows: Sequence[Row] | Row) -> list[TokenSequence]:
        """The sequences of all rows, in order, without padding."""
        if isinstance(rows, Mapping):
            rows = [rows]
        if not rows:
            raise InvalidInput("inputs", "is empty; send at least one row")
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

    def _pad(self, name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        # A packed batch is unpacked to the right, whatever the side of padding.
        side = "right" if self.padding_free else self.padding_side
        return pad_sequence(list(values), batch_first=True, padding_value=PADDING[name], padding_side=side)


def _sequences(field: str, row: Row) -> list[TokenSequence]:
    if "input_ids" not in row:
        raise InvalidInput(f"{field}.input_ids", "is missing; encode the row with a template first")
    input_ids = _integers(f"{field}.input_ids", row["input_ids"])
    if not len(input_ids):
        raise InvalidInput(f"{field}.input_ids", "is empty; send at least one token")
    position_ids = _optional(field, row, "position_ids", len(input_ids))
    labels = None if row.get("labels") is None else _numbers(f"{field}.labels", row["labels"])
    mask = _optional(field, row, "attention_mask", len(input_ids))
    if mask is not None and not bool(mask.bool().all()):
        kept = mask.bool()
        labels = labels[kept] if labels is not None and len(labels) == len(kept) else labels
        position_ids = None if position_ids is None else position_ids[kept]
        input_ids = input_ids[kept]
    pictures = _pictures(field, row)
    if position_ids is None or pictures is not None:
        # With pictures positions have three axes, which follow from where these lie.
        return [TokenSequence(input_ids, torch.arange(len(input_ids)), labels, pictures)]
    starts = [0, *((position_ids[1:] == 0) & (position_ids[:-1] != -1)).nonzero().flatten().add(1).tolist()]
    if len(starts) == 1:
        return [TokenSequence(input_ids, position_ids, labels)]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], len(input_ids)], strict=True)]
    split = [None] * len(sizes) if labels is None else _split_labels(field, labels, sizes)
    return [
        TokenSequence(ids, positions, targets)
        for ids, positions, targets in zip(input_ids.split(sizes), position_ids.split(sizes), split, strict=True)
    ]


def _pictures(field: str, row: Row) -> RowPictures | None:
    if row.get("pixel_values") is None:
        return None
    if row.get("image_grid_thw") is None:
        raise InvalidInput(f"{field}.image_grid_thw", "is missing; send it with pixel_values")
    pixel_values, grids = torch.as_tensor(row["pixel_values"]), torch.as_tensor(row["image_grid_thw"])
    if grids.dim() != 2 or grids.shape[1] != 3 or grids.is_floating_point():
        raise InvalidInput(f"{field}.image_grid_thw", f"has shape {tuple(grids.shape)}; send (pictures, 3) integers")
    if pixel_values.dim() != 2 or len(pixel_values) != int(grids.prod(1).sum()):
        raise InvalidInput(
            f"{field}.pixel_values",
            f"has shape {tuple(pixel_values.shape)}; send a row for each of {int(grids.prod(1).sum())} patches",
        )
    return RowPictures(pixel_values.cpu(), grids.cpu())


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
