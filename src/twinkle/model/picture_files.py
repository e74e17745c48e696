"""The files of pictures, decoded."""

from __future__ import annotations

import io

import PIL.Image
import PIL.ImageOps

from twinkle.core.errors import InvalidInput

FILE_FORMATS = ("PNG", "JPEG")


def decoded(data: bytes) -> PIL.Image.Image:
    """A file's picture, upright as its camera meant it.

    Raises:
        InvalidInput: It cannot be decoded.
    """
    try:
        with PIL.Image.open(io.BytesIO(data), formats=FILE_FORMATS) as image:
            image.load()
            return PIL.ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise InvalidInput("picture", f"cannot be decoded: {error}") from None
