"""What is known of pictures without looking at their pixels: how many tokens a model makes of one, and what is allowed.

A model cuts a picture into square patches and merges neighbouring ones into a token each, after it has brought the
picture to a size that it likes. So the size in the head of a file is enough to count its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, kw_only=True)
class PictureRules:
    """How one model counts the tokens of a picture, as its image processor's settings say."""

    token_id: int
    """Stands in a prompt for each token of a picture."""
    other_token_ids: tuple[int, ...] = ()
    """Those of films, which are not taken."""
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    max_side_patches: int | None = None
    """Of a picture that is only ever made smaller, and filled up to whole tokens at its right and its bottom (Kimi);
    without it one is stretched to whole tokens (Qwen)."""
    one_axis: bool = False
    """Its tokens have positions like those of a text; else these spread over rows and columns."""

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """What is none of a text's tokens."""
        return (self.token_id, *self.other_token_ids)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches.

        As ``smart_resize`` of transformers' Qwen2-VL: multiples of a token's side, as near to the aspect ratio as can
        be, between ``min_pixels`` and ``max_pixels``. Python's ``round``, which rounds halves to even, is part of it.
        """
        side = self.patch_size * self.merge_size
        if self.max_side_patches is not None:
            max_patches = self.max_pixels // self.patch_size**2
            filled = shrunk(width, height, self.patch_size, max_patches, self.max_side_patches)
            columns, rows = (math.ceil(length / side) * self.merge_size for length in filled)
            return rows, columns
        rows, columns = round(height / side) * side, round(width / side) * side
        if rows * columns > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            rows = max(side, math.floor(height / beta / side) * side)
            columns = max(side, math.floor(width / beta / side) * side)
        elif rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * beta / side) * side
            columns = math.ceil(width * beta / side) * side
        return rows // self.patch_size, columns // self.patch_size

    def could_make(self, rows: int, columns: int) -> bool:
        """Whether a picture may be of so many patches; with some room where it is filled up."""
        if self.max_side_patches is None:
            return rows * columns * self.patch_size**2 <= self.max_pixels
        # What is made smaller has up to a token more to each side, and was measured in whole patches, rounded down.
        inner = (rows - self.merge_size) * (columns - self.merge_size)
        is_short = max(rows, columns) < self.max_side_patches + self.merge_size
        return is_short and inner <= 2 * self.max_pixels // self.patch_size**2

    def num_tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of this size is."""
        rows, columns = self.grid(width, height)
        return rows * columns // self.merge_size**2


@dataclass(frozen=True, kw_only=True)
class PictureLimits:
    """What a client may send; the first two are of one picture, the third of one datum or prompt."""

    max_bytes: int
    max_pixels: int
    max_pictures: int

    def check_number(self, field: str, num_pictures: int) -> None:
        """Raise ``InvalidInput`` for more pictures than may be in one datum or prompt."""
        if num_pictures > self.max_pictures:
            raise InvalidInput(field, f"holds {num_pictures} pictures, more than {self.max_pictures}; send fewer")

    def check_size(self, field: str, width: int, height: int) -> None:
        """Raise ``InvalidInput`` for a picture that would take too much to decode, or has no sensible shape."""
        if width * height > self.max_pixels:
            raise InvalidInput(
                field,
                f"is a picture of {width} x {height} pixels, more than {self.max_pixels}; make it smaller",
            )
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise InvalidInput(
                field,
                f"is a picture of {width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other",
            )


def shrunk(width: int, height: int, patch_size: int, max_patches: int, max_side_patches: int) -> tuple[int, int]:
    """The width and height that a picture has within so many patches in all and along a side; it is never enlarged.

    As ``navit_resize`` of transformers' Kimi-K2.5, before it fills up (NaViT, arXiv 2307.06304).
    """
    longest = max_side_patches * patch_size
    num_patches = max(1, width // patch_size) * max(1, height // patch_size)
    scale = min(1.0, math.sqrt(max_patches / num_patches), longest / width, longest / height)
    return min(max(1, int(width * scale)), longest), min(max(1, int(height * scale)), longest)


def expand_places(tokens: Sequence[int], token_id: int, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens in which each ``token_id`` becomes as many as ``lengths`` has for it, and where each of these runs begins.

    There is a length for each place.
    """
    left = iter(lengths)
    expanded: list[int] = []
    starts: list[int] = []
    for token in tokens:
        if token == token_id:
            starts.append(len(expanded))
            expanded += [token] * next(left)
        else:
            expanded.append(token)
    return expanded, starts
