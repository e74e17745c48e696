"""The templates that documents and commands call by name."""

from __future__ import annotations

from functools import cached_property

from twinkle.data_format.deepseek import DeepseekWriter
from twinkle.template.base import Template
from twinkle.template.rendering import Renderer


class Qwen3_5Template(Template):  # noqa: N801 - the name is the documents'
    """For Qwen3.5, and for every model with a chat template: with pictures, whose positions have three axes, or none.

    A model of text alone has plain positions, and nothing for pictures is loaded.
    """


class Qwen2_5VLTemplate(Template):  # noqa: N801
    """For Qwen2.5-VL: as Qwen3.5's, whose pictures are prepared in the same way."""


class Gemma4Template(Template):
    """For Gemma 4, whose pictures stand between two tokens of their own."""


class DeepseekV4Template(Template):
    """For DeepSeek-V4, which comes without one of its own. ``reasoning_effort`` may be ``high`` or ``max``."""

    @cached_property
    def renderer(self) -> Renderer:
        """See :class:`Template`."""
        return DeepseekWriter(is_thinking=self.enable_thinking, **self.variables)
