"""The templates that documents and commands call by name."""

from __future__ import annotations

from twinkle.template.base import Template


class Qwen3_5Template(Template):  # noqa: N801 - the name is the documents'
    """For Qwen3.5 and every model that comes with a chat template, with pictures or for text alone."""
