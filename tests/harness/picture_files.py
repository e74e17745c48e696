"""Tiny pictures made on the spot. Without torch: the tests of the queue have none."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture_file(
    seed: int, *, width: int = 24, height: int = 16, file_format: str = "PNG", **settings: object
) -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=file_format, **settings)
    return file.getvalue()
