"""The template of DeepSeek-V4, which comes without one of its own."""

from __future__ import annotations

from functools import cached_property

from twinkle.data_format.deepseek import DeepseekWriter
from twinkle.template.base import Template
from twinkle.template.rendering import Renderer


class DeepseekV4Template(Template):
    """For DeepSeek-V4. ``reasoning_effort`` may be ``high`` or ``max``."""

    @cached_property
    def renderer(self) -> Renderer:
        """See :class:`Template`."""
        return DeepseekWriter(is_thinking=self.enable_thinking, **self.variables)
