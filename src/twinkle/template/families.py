"""The templates that documents and commands call by name."""

from __future__ import annotations

from twinkle.template.base import Template


class Qwen3_5Template(Template):  # noqa: N801 - the name is the documents'
    """For Qwen3.5, and for every model that comes with a chat template: with pictures, whose tokens have positions along
    three axes, or for text alone.
    """


class Qwen2_5VLTemplate(Template):  # noqa: N801
    """For Qwen2.5-VL: as Qwen3.5's, whose pictures are prepared in the same way."""
