"""Lines, dots and words on a page; as an SVG they are drawn without any library.

Colours are ``#rrggbb``; places are pixels from the page's upper left corner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Literal

Place = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


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
