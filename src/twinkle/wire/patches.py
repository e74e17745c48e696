"""Pictures that a client's own image processor has cut into patches, as tensors beside those of a loss.

So rows of vision-language templates travel: ``pixel_values`` [patches, values] of all pictures of a datum, one after
the other, ``image_grid_thw`` [pictures, 3] with each one's grid, and perhaps ``mm_token_type_ids``. The tokens that
stand for them are among the datum's tokens already.
"""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire.pictures import read_base64
from twinkle.wire.tensors import Array

PATCHES, GRIDS, KINDS = "pixel_values", "image_grid_thw", "mm_token_type_ids"
PATCH_INPUTS = (PATCHES, GRIDS, KINDS)

Grid = tuple[int, int, int]


_STORED = np.dtype("<f4")


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
    grids: Array | None, *, prefix: str, rules: PictureRules | None, limits: PictureLimits | None = None
) -> list[Grid]:
    """The grids of a datum's pictures; ``prefix`` stands before the tensors' names where somebody is told of one.

    Raises:
        InvalidInput: The model takes no pictures, or a grid is none of a picture that it could take.
    """
    if rules is None:
        raise InvalidInput(f"{prefix}{PATCHES}", "is a picture, but this model takes text alone")
    place = f"{prefix}{GRIDS}"
    if grids is None:
        raise InvalidInput(place, f"is missing; send it with {PATCHES}")
    if grids.dtype.kind not in "iu" or grids.size == 0 or grids.size % 3:
        raise InvalidInput(place, f"has shape {grids.shape} and dtype {grids.dtype}; send (pictures, 3) integers")
    found = [(time, rows, columns) for time, rows, columns in grids.reshape(-1, 3).tolist()]
    if limits is not None:
        limits.check_number(place, len(found))
    for number, grid in enumerate(found):
        _check_grid(grid, at=f"{place}[{number}]", rules=rules, limits=limits)
    return found


def check_grid(
    grid: Grid | None, *, field: str, rules: PictureRules | None, limits: PictureLimits | None = None
) -> int:
    """How many tokens a picture of a prompt is by its grid; raises as :func:`read_grids` does."""
    if rules is None:
        raise InvalidInput(field, "is a picture, but this model takes text alone")
    if grid is None:
        raise InvalidInput(f"{field}.grid_thw", "is missing")
    _check_grid(grid, at=f"{field}.grid_thw", rules=rules, limits=limits)
    return grid[1] * grid[2] // rules.merge_size**2


def _check_grid(grid: Grid, *, at: str, rules: PictureRules, limits: PictureLimits | None) -> None:
    time, rows, columns = grid
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


def write_patches(patches: WirePatches) -> str:
    """The values of a picture as the chunk of a prompt has them."""
    return base64.b64encode(np.ascontiguousarray(patches.pixel_values, dtype=_STORED).tobytes()).decode()


def read_patches(data: str | None, grid: Grid | None, *, field: str) -> Array:
    """What :func:`write_patches` wrote, [patches, values]; raises ``InvalidInput`` when it is of another size."""
    if data is None or grid is None:
        raise InvalidInput(f"{field}.{'data' if data is None else 'grid_thw'}", "is missing")
    raw, num_patches = read_base64(data, field=f"{field}.data"), grid[0] * grid[1] * grid[2]
    if not raw or len(raw) % (num_patches * _STORED.itemsize):
        raise InvalidInput(
            f"{field}.data", f"holds {len(raw)} bytes, which are no float32 for each of {num_patches} patches"
        )
    values = np.frombuffer(raw, _STORED).reshape(num_patches, -1)
    if not np.isfinite(values).all():
        raise InvalidInput(f"{field}.data", "holds numbers that are not finite")
    return values


def place_patches(
    tokens: Array, inputs: dict[str, Array], *, prefix: str, tokens_field: str, rules: PictureRules | None
) -> tuple[WirePatches, ...]:
    """Takes the pictures of a datum, or of a row, out of its inputs, each placed where its tokens are.

    Args:
        tokens: The datum's.
        inputs: Its tensors by their names.
        prefix: What stands before those names where somebody is told of one.
        tokens_field: Where the tokens were sent.
        rules: How the model counts pictures.

    Raises:
        InvalidInput: They are not what the grids say, or not as many tokens stand for them.
    """
    sent = {name: inputs.pop(name) for name in PATCH_INPUTS if name in inputs}
    if not have_patches(sent):
        return ()
    grids = read_grids(sent.get(GRIDS), prefix=prefix, rules=rules)
    assert rules is not None, "patches were refused without rules"
    values, num_patches = sent.get(PATCHES), sum(rows * columns for _, rows, columns in grids)
    if values is None:
        raise InvalidInput(f"{prefix}{PATCHES}", f"is missing; send it with {GRIDS}")
    if values.dtype.kind != "f" or values.size == 0 or values.size % num_patches or not np.isfinite(values).all():
        raise InvalidInput(
            f"{prefix}{PATCHES}",
            f"has shape {values.shape} and dtype {values.dtype}; send finite numbers, a row for each of {num_patches}"
            " patches",
        )
    if values.ndim > 1 and values.shape[0] != num_patches:
        raise InvalidInput(f"{prefix}{PATCHES}", f"has {values.shape[0]} rows for the {num_patches} patches of {GRIDS}")
    is_picture = tokens == rules.token_id
    lengths = [rows * columns // rules.merge_size**2 for _, rows, columns in grids]
    if int(is_picture.sum()) != sum(lengths):
        raise InvalidInput(
            tokens_field,
            f"holds {int(is_picture.sum())} tokens {rules.token_id} that stand for pictures, but {GRIDS} makes"
            f" {sum(lengths)}; encode it with this model's processor",
        )
    kinds = sent.get(KINDS)
    if kinds is not None and not np.array_equal(kinds.reshape(-1) != 0, is_picture):
        raise InvalidInput(f"{prefix}{KINDS}", "is not 1 exactly where tokens stand for pictures")
    places = np.flatnonzero(is_picture)
    firsts = np.cumsum([0, *lengths])[:-1]
    bounds = np.cumsum([rows * columns for _, rows, columns in grids])[:-1]
    parts = np.split(values.reshape(num_patches, -1), bounds)
    return tuple(
        WirePatches(int(places[first]), length, part, grid)
        for first, length, part, grid in zip(firsts, lengths, parts, grids, strict=True)
    )
