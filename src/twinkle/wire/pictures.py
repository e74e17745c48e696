"""Pictures as clients send them: which files are taken, and how many tokens one is, by the size in its head alone.

Nothing here decodes a picture. A few hundred bytes can stand for gigabytes of pixels, so the size comes first.
"""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules

FORMATS = ("png", "jpeg")
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"
_JPEG_HEAD = b"\xff\xd8"
# Start-of-frame markers; C4, C8 and CC of their range are none.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# These stand alone; all others are followed by their length.
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9


@dataclass(frozen=True, eq=False)
class WirePicture:
    """A picture among tokens: ``num_tokens`` of them from ``start`` on stand for it."""

    start: int
    num_tokens: int
    data: bytes

    @property
    def format(self) -> str:
        """What the file begins as."""
        return format_of(self.data) or "jpeg"


@dataclass(frozen=True, eq=False)
class SentPicture:
    """A picture's chunk, as it was sent."""

    data: bytes
    format: str
    expected_tokens: int | None

    def num_tokens(self, field: str, rules: PictureRules | None, limits: PictureLimits | None = None) -> int:
        """How many tokens a model makes of it.

        Raises:
            InvalidInput: The model takes no pictures, the file is of another kind or over a limit, or the client
                expects another number of tokens.
        """
        if rules is None:
            raise InvalidInput(field, "is a picture, but this model takes text alone")
        if self.format not in FORMATS:
            raise InvalidInput(f"{field}.format", f"must be one of {', '.join(FORMATS)}, not {self.format[:20]!r}")
        if limits is not None and len(self.data) > limits.max_bytes:
            raise InvalidInput(
                f"{field}.data", f"is a file of {len(self.data)} bytes, more than {limits.max_bytes}; make it smaller"
            )
        width, height = picture_size(self.data, self.format, field=f"{field}.data")
        if limits is not None:
            limits.check_size(f"{field}.data", width, height)
        counted = rules.num_tokens(width, height)
        if self.expected_tokens is not None and self.expected_tokens != counted:
            raise InvalidInput(
                f"{field}.expected_tokens",
                f"is {self.expected_tokens}, but this model makes {counted} tokens of {width} x {height} pixels",
            )
        return counted


def format_of(data: bytes) -> str | None:
    """What a file begins as; None if it is of no kind that is taken."""
    if data.startswith(_PNG_HEAD):
        return "png"
    return "jpeg" if data.startswith(_JPEG_HEAD) else None


def read_base64(text: str, *, field: str) -> bytes:
    """The bytes of a picture in a JSON body."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(field, "is not valid base64") from None


def read_data_url(url: str, *, field: str) -> SentPicture:
    """The picture in a ``data:`` URL. No other address is opened.

    Raises:
        InvalidInput: It is an address, or holds no picture of a format that is taken.
    """
    head, comma, text = url.partition(",")
    if not head.lower().startswith("data:"):
        raise InvalidInput(
            field, "is an address, and this server opens none; send the picture itself as data:image/png;base64,..."
        )
    kind, _, encoding = head[len("data:") :].partition(";")
    family, _, picture_format = kind.partition("/")
    if not comma or family != "image" or encoding != "base64":
        raise InvalidInput(field, f"must begin data:image/png;base64, or the like, not {head[:40]!r}")
    return SentPicture(read_base64(text, field=field), picture_format, None)


def picture_size(data: bytes, picture_format: str, *, field: str) -> tuple[int, int]:
    """Width and height as the file's head says; raises ``InvalidInput`` when it is no such file."""
    size = _png_size(data) if picture_format == "png" else _jpeg_size(data)
    if size is None:
        raise InvalidInput(field, f"is not a {picture_format} file")
    width, height = size
    if width < 1 or height < 1:
        raise InvalidInput(field, f"is a picture of {width} x {height} pixels, which is none")
    return size


def _png_size(data: bytes) -> tuple[int, int] | None:
    if len(data) < 24 or not data.startswith(_PNG_HEAD) or data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(_JPEG_HEAD):
        return None
    at = len(_JPEG_HEAD)
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a byte of filling
            at += 1
        elif marker in _JPEG_BARE:
            at += 2
        elif marker in _JPEG_FRAMES:
            if at + 9 > len(data):
                return None
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        elif marker in (_JPEG_SCAN, _JPEG_END):
            return None
        else:
            at += 2 + max(int.from_bytes(data[at + 2 : at + 4], "big"), 2)
    return None
