"""Positions of a sequence with pictures, as models with a rotary embedding of three axes count them.

Text goes on along all three axes at once. A picture lies at one moment and spreads over rows and columns; what follows
it goes on after its longer side. (M-RoPE, Qwen2-VL, arXiv 2409.12191; for pictures it is the same in all its kin.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_AXES = 3

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PictureSpan:
    """A picture of ``rows x columns`` tokens whose first is number ``start`` of a sequence."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """The number of the token after it."""
        return self.start + self.rows * self.columns


def mrope_positions(num_tokens: int, pictures: Sequence[PictureSpan]) -> tuple[Positions, int]:
    """The positions [3, N] (moment, row, column) of a sequence, and what the token after it has on each axis."""
    positions_3N = np.empty((NUM_AXES, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for picture in pictures:
        positions_3N[:, token : picture.start] = position + np.arange(picture.start - token)
        position += picture.start - token
        grid = np.indices((picture.rows, picture.columns)).reshape(2, -1)
        positions_3N[0, picture.start : picture.end] = position
        positions_3N[1:, picture.start : picture.end] = position + grid
        position += max(picture.rows, picture.columns)
        token = picture.end
    positions_3N[:, token:] = position + np.arange(num_tokens - token)
    return positions_3N, position + num_tokens - token
