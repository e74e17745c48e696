"""Pictures that a client's own image processor has cut into patches, as tensors beside those of a loss.

So rows of vision-language templates travel: ``pixel_values`` [patches, values] of all pictures of a datum, one after
the other, ``image_grid_thw`` [pictures, 3] with each one's grid, and perhaps ``mm_token_type_ids``. The tokens that
stand for them are among the datum's tokens already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire.tensors import Array

PATCHES, GRIDS, KINDS = "pixel_values", "image_grid_thw", "mm_token_type_ids"
PATCH_INPUTS = (PATCHES, GRIDS, KINDS)

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class WirePatches:
    """A picture's patches among tokens: ``num_tokens`` of them from ``start`` on stand for it."""

    start: int
    num_tokens: int
    pixel_values: Array
    grid_thw: Grid


def have_patches(names: Collection[str]) -> bool:
    """Whether a datum with such inputs brings pictures."""
    return PATCHES in names or GRIDS in names


def read_grids(
    grids: Array | None, *, field: str, rules: PictureRules | None, limits: PictureLimits | None = None
) -> list[Grid]:
    """The grids of a datum's pictures.

    Raises:
        InvalidInput: The model takes no pictures, or a grid is none of a picture that it could take.
    """
    if rules is None:
        raise InvalidInput(f"{field}.{PATCHES}", "is a picture, but this model takes text alone")
    place = f"{field}.{GRIDS}"
    if grids is None:
        raise InvalidInput(place, f"is missing; send it with {PATCHES}")
    if grids.dtype.kind not in "iu" or grids.size == 0 or grids.size % 3:
        raise InvalidInput(place, f"has shape {grids.shape} and dtype {grids.dtype}; send (pictures, 3) integers")
    found = [(time, rows, columns) for time, rows, columns in grids.reshape(-1, 3).tolist()]
    if limits is not None:
        limits.check_number(place, len(found))
    for number, (time, rows, columns) in enumerate(found):
        at = f"{place}[{number}]"
        if time != 1 or min(rows, columns) < 1 or rows % rules.merge_size or columns % rules.merge_size:
            raise InvalidInput(
                at,
                f"is {[time, rows, columns]}; a picture is one moment of rows and columns that are multiples of"
                f" {rules.merge_size}",
            )
        width, height = columns * rules.patch_size, rows * rules.patch_size
        if not rules.could_make(rows, columns):
            raise InvalidInput(
                at, f"is of {width} x {height} pixels, but this model's processor makes at most {rules.max_pixels}"
            )
        if limits is not None:
            limits.check_size(at, width, height)
    return found


def place_patches(
    tokens: Array, inputs: dict[str, Array], *, field: str, rules: PictureRules | None
) -> tuple[WirePatches, ...]:
    """Takes the pictures of a datum out of its inputs, each placed where its tokens are.

    Raises:
        InvalidInput: They are not what the grids say, or not as many tokens stand for them.
    """
    sent = {name: inputs.pop(name) for name in PATCH_INPUTS if name in inputs}
    place = f"{field}.loss_fn_inputs"
    if not have_patches(sent):
        return ()
    grids = read_grids(sent.get(GRIDS), field=place, rules=rules)
    assert rules is not None, "patches were refused without rules"
    values, num_patches = sent.get(PATCHES), sum(rows * columns for _, rows, columns in grids)
    if values is None:
        raise InvalidInput(f"{place}.{PATCHES}", f"is missing; send it with {GRIDS}")
    if values.dtype.kind != "f" or values.size == 0 or values.size % num_patches or not np.isfinite(values).all():
        raise InvalidInput(
            f"{place}.{PATCHES}",
            f"has shape {values.shape} and dtype {values.dtype}; send finite numbers, a row for each of {num_patches}"
            " patches",
        )
    if values.ndim > 1 and values.shape[0] != num_patches:
        raise InvalidInput(f"{place}.{PATCHES}", f"has {values.shape[0]} rows for the {num_patches} patches of {GRIDS}")
    is_picture = tokens == rules.token_id
    lengths = [rows * columns // rules.merge_size**2 for _, rows, columns in grids]
    if int(is_picture.sum()) != sum(lengths):
        raise InvalidInput(
            f"{field}.model_input",
            f"holds {int(is_picture.sum())} tokens {rules.token_id} that stand for pictures, but {GRIDS} makes"
            f" {sum(lengths)}; encode it with this model's processor",
        )
    kinds = sent.get(KINDS)
    if kinds is not None and not np.array_equal(kinds.reshape(-1) != 0, is_picture):
        raise InvalidInput(f"{place}.{KINDS}", "is not 1 exactly where tokens stand for pictures")
    places = np.flatnonzero(is_picture)
    firsts = np.cumsum([0, *lengths])[:-1]
    bounds = np.cumsum([rows * columns for _, rows, columns in grids])[:-1]
    parts = np.split(values.reshape(num_patches, -1), bounds)
    return tuple(
        WirePatches(int(places[first]), length, part, grid)
        for first, length, part, grid in zip(firsts, lengths, parts, grids, strict=True)
    )
