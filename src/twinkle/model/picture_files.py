"""The files of pictures, decoded."""

from __future__ import annotations

import io
from collections.abc import Sequence

import PIL.Image
import PIL.ImageOps

from twinkle.core.errors import InvalidInput

FILE_FORMATS = ("PNG", "JPEG")


def decoded(data: bytes, formats: Sequence[str] = FILE_FORMATS) -> PIL.Image.Image:
    """A file's picture, upright as its camera meant it; of other formats than these it is none.

    Raises:
        InvalidInput: It cannot be decoded.
    """
    try:
        with PIL.Image.open(io.BytesIO(data), formats=list(formats)) as image:
            image.load()
            return PIL.ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise InvalidInput("picture", f"cannot be decoded: {error}") from None
