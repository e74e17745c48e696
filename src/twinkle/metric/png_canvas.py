"""The page as a PNG: the one module of metrics that needs Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, ImageColor, ImageDraw, ImageFont

from twinkle.metric.canvas import Anchor, Canvas, Place

FINER = 2
"""It is drawn so many times larger and then made smaller, so that its lines are smooth."""


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
