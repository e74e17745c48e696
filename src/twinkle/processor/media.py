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
from twinkle.data_format.media import OF_PICTURES, num_pictures, pictures_between

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
SOUNDS = ("input_features", "input_values", "audio_values")
"""What processors make of sounds, which no model here takes."""
MEMBER_LENGTHS, MEMBER_PICTURES = "member_lengths", "member_pictures"
"""Of a packed row with pictures: tokens and pictures of each of its members, in their order."""
_BY_MEMBER_TOKEN = ("input_ids", "labels", "attention_mask", *BY_TOKEN)


@dataclass(frozen=True, eq=False)
class RowPictures:
    """The pictures of a row: patches [P, ...] and each one's grid [B, 3]."""

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor


def read_media(field: str, row: Mapping[str, Any], num_tokens: int) -> dict[str, torch.Tensor]:
    """The fields of a row that are of its pictures; what holds nothing is none.

    Raises:
        InvalidInput: A field is no array of numbers, or does not fit the tokens, or is of sounds.
    """
    for name in SOUNDS:
        if row.get(name) is not None and len(row[name]):
            raise InvalidInput(f"{field}.{name}", "is sound, which no model here takes; leave such rows out")
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


def refuse_media(field: str, media: Mapping[str, torch.Tensor], reason: str) -> None:
    """Raise ``InvalidInput`` for what a row has of pictures or films."""
    for name in PIXELS:
        if name in media:
            raise InvalidInput(f"{field}.{name}", reason)


def members_of(field: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that lie in a packed row with pictures.

    Raises:
        InvalidInput: Their lengths or numbers of pictures are not those of the row.
    """
    lengths = [int(length) for length in row[MEMBER_LENGTHS]]
    given = row.get(MEMBER_PICTURES)
    counts = [0] * len(lengths) if given is None else [int(count) for count in given]
    num_tokens = len(row["input_ids"])
    if min(lengths, default=0) < 1 or sum(lengths) != num_tokens:
        raise InvalidInput(f"{field}.{MEMBER_LENGTHS}", f"are {lengths}; the row has {num_tokens} input_ids")
    if len(counts) != len(lengths) or sum(counts) != num_pictures(row):
        raise InvalidInput(f"{field}.{MEMBER_PICTURES}", f"are {counts}; the row has {num_pictures(row)} pictures")
    media = {name: torch.as_tensor(row[name]) for name in OF_PICTURES if row.get(name) is not None}
    positions = None if row.get("position_ids") is None else torch.as_tensor(row["position_ids"])
    members = []
    start = first = 0
    for length, count in zip(lengths, counts, strict=True):
        member = {name: row[name][start : start + length] for name in _BY_MEMBER_TOKEN if row.get(name) is not None}
        if positions is not None:
            member["position_ids"] = positions[..., start : start + length]
        members.append({**member, **pictures_between(media, first, first + count)})
        start, first = start + length, first + count
    return members


def batch_media(
    media: Sequence[Mapping[str, torch.Tensor]], lengths: Sequence[int], padding_side: str
) -> dict[str, torch.Tensor]:
    """The fields of all rows; a row that lacks what others have is text alone."""
    batch: dict[str, torch.Tensor] = {}
    for name, filling in STACKED.items():
        values = [of_row[name] for of_row in media if name in of_row]
        if values:
            batch[name] = stacked(name, values, filling)
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


def stacked(name: str, values: Sequence[torch.Tensor], filling: float) -> torch.Tensor:
    """Values of several rows one after the other, smaller ones filled up."""
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
