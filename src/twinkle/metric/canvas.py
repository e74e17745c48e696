"""Lines, dots and words on a page: as an SVG, drawn without any library, or as a PNG.

Colours are ``#rrggbb``; places are pixels from the page's upper left corner.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Literal

from PIL import Image, ImageColor, ImageDraw, ImageFont

Place = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

FINER = 2
"""A PNG is drawn so many times larger and then made smaller, so that its lines are smooth."""


class Canvas(ABC):
    """A white page that is drawn on."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height

    @abstractmethod
    def line(self, places: Sequence[Place], colour: str, *, width: int = 1, opacity: float = 1) -> None:
        """Draw from place to place."""

    @abstractmethod
    def dot(self, place: Place, colour: str) -> None:
        """Draw a dot."""

    @abstractmethod
    def text(self, place: Place, words: str, *, anchor: Anchor = "start", size: int = 12, colour: str = "") -> None:
        """Write a line that begins, has its middle or ends at a place on its ground line."""

    @abstractmethod
    def content(self) -> bytes:
        """The page as a file."""


class SvgCanvas(Canvas):
    """The page as an SVG."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self._parts: list[str] = []

    def line(self, places: Sequence[Place], colour: str, *, width: int = 1, opacity: float = 1) -> None:
        """See :class:`Canvas`."""
        points = " ".join(f"{x},{y}" for x, y in places)
        look = f'stroke="{colour}" stroke-width="{width}" opacity="{opacity}"'
        self._parts.append(f'<polyline points="{points}" fill="none" {look}/>')

    def dot(self, place: Place, colour: str) -> None:
        """See :class:`Canvas`."""
        self._parts.append(f'<circle cx="{place[0]}" cy="{place[1]}" r="3" fill="{colour}"/>')

    def text(self, place: Place, words: str, *, anchor: Anchor = "start", size: int = 12, colour: str = "") -> None:
        """See :class:`Canvas`."""
        look = f'text-anchor="{anchor}" font-size="{size}" fill="{colour or "black"}"'
        self._parts.append(f'<text x="{place[0]}" y="{place[1]}" {look}>{escape(words)}</text>')

    def content(self) -> bytes:
        """See :class:`Canvas`."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        ).encode()


class PngCanvas(Canvas):
    """The page as a PNG."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self._image = Image.new("RGB", (width * FINER, height * FINER), "white")
        self._draw = ImageDraw.Draw(self._image)

    def line(self, places: Sequence[Place], colour: str, *, width: int = 1, opacity: float = 1) -> None:
        """See :class:`Canvas`; what shines through is the white of the page."""
        red, green, blue = (round(255 - (255 - part) * opacity) for part in ImageColor.getrgb(colour)[:3])
        finer = [(x * FINER, y * FINER) for x, y in places]
        self._draw.line(finer, fill=(red, green, blue), width=width * FINER, joint="curve")

    def dot(self, place: Place, colour: str) -> None:
        """See :class:`Canvas`."""
        self._draw.circle((place[0] * FINER, place[1] * FINER), 3 * FINER, fill=colour)

    def text(self, place: Place, words: str, *, anchor: Anchor = "start", size: int = 12, colour: str = "") -> None:
        """See :class:`Canvas`."""
        side = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        font = ImageFont.load_default(size * FINER)
        self._draw.text((place[0] * FINER, place[1] * FINER), words, fill=colour or "black", font=font, anchor=side)

    def content(self) -> bytes:
        """See :class:`Canvas`."""
        content = io.BytesIO()
        self._image.resize((self.width, self.height), Image.Resampling.LANCZOS).save(content, "PNG", optimize=True)
        return content.getvalue()
