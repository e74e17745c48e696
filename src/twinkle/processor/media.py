"""What rows hold besides tokens: pictures, as image processors give them.

Shapes: B sequences, T positions of the longest, N tokens of a row, P patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import InvalidInput

STACKED = {
    "pixel_values": 0.0,
    "image_grid_thw": 0,
    "image_position_ids": -1,
    "pixel_values_videos": 0.0,
    "video_grid_thw": 0,
    "video_position_ids": -1,
}
"""The pictures of all rows one after the other, and what fills those that are smaller than others."""
BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
"""Of each token what it stands for; 0 is text."""
PIXELS = ("pixel_values", "pixel_values_videos")


@dataclass(frozen=True, eq=False)
class RowPictures:
    """The pictures of a row: patches [P, ...] and each one's grid [B, 3]."""

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


def read_media(field: str, row: Mapping[str, Any], num_tokens: int) -> dict[str, torch.Tensor]:
    """The fields of a row that are of its pictures; what holds nothing is none.

    Raises:
        InvalidInput: A field is no array of numbers, or does not fit the tokens.
    """
    media: dict[str, torch.Tensor] = {}
    for name in (*STACKED, *BY_TOKEN):
        if row.get(name) is None:
            continue
        try:
            values = torch.as_tensor(row[name]).cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidInput(f"{field}.{name}", "must be a list, an array or a tensor of numbers") from error
        if name in BY_TOKEN:
            values = values.reshape(-1)
            if len(values) != num_tokens:
                raise InvalidInput(f"{field}.{name}", f"has {len(values)} values for {num_tokens} input_ids")
        if values.numel():
            media[name] = values
    return media


def read_pictures(field: str, media: Mapping[str, torch.Tensor]) -> RowPictures | None:
    """The pictures whose patches lie one after the other, told apart by their grids."""
    pixel_values, grids = media.get("pixel_values"), media.get("image_grid_thw")
    if pixel_values is None or "image_position_ids" in media:
        return None
    if grids is None:
        raise InvalidInput(f"{field}.image_grid_thw", "is missing; send it with pixel_values")
    if grids.dim() != 2 or grids.shape[1] != 3 or grids.is_floating_point():
        raise InvalidInput(f"{field}.image_grid_thw", f"has shape {tuple(grids.shape)}; send (pictures, 3) integers")
    if pixel_values.dim() < 2 or len(pixel_values) != int(grids.prod(1).sum()):
        raise InvalidInput(
            f"{field}.pixel_values",
            f"has shape {tuple(pixel_values.shape)}; send a row for each of {int(grids.prod(1).sum())} patches",
        )
    return RowPictures(pixel_values, grids)


def batch_media(
    media: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[int], padding_side: str
) -> dict[str, torch.Tensor]:
    """The fields of all rows; a row that lacks what others have is text alone."""
    batch: dict[str, torch.Tensor] = {}
    for name, filling in STACKED.items():
        values = [of_row[name] for of_row in media if name in of_row]
        if values:
            batch[name] = _stacked(name, values, filling)
    if not any(name in batch for name in PIXELS):
        return batch
    for name in BY_TOKEN:
        if any(name in of_row for of_row in media):
            rows = [
                of_row.get(name, torch.zeros(length, dtype=torch.int64)).to(torch.int64)
                for of_row, length in zip(media, lengths, strict=True)
            ]
            batch[name] = pad_sequence(rows, batch_first=True, padding_side=padding_side)
    return batch


def _stacked(name: str, values: Sequence[torch.Tensor], filling: float) -> torch.Tensor:
    dims = {tensor.dim() for tensor in values}
    if len(dims) > 1:
        raise InvalidInput("inputs", f"have {name} of {sorted(dims)} dimensions; encode all rows with one template")
    sizes = [max(tensor.shape[dim] for tensor in values) for dim in range(1, values[0].dim())]
    filled = []
    for tensor in values:
        missing = [size - own for size, own in zip(sizes, tensor.shape[1:], strict=True)]
        padding = [edge for gap in reversed(missing) for edge in (0, gap)]
        filled.append(functional.pad(tensor, padding, value=filling) if any(missing) else tensor)
    return torch.cat(filled)
