"""The original of a passage that was condensed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twinkle.data_format.conversation import Tool as ToolInfo
from twinkle_agentic.tools.base import Tool


class ExtractCondensed(Tool):
    """Tells a model what a numbered block was before it was condensed.

    Args:
        originals: By number (``Chunks.originals``).
    """

    NAME = "extract_condensed"

    def __init__(self, originals: Sequence[str]) -> None:
        self._originals = list(originals)

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """See :class:`Tool`."""
        number = int(arguments["block"])
        if not 0 <= number < len(self._originals):
            raise ValueError(f"there are {len(self._originals)} blocks, numbered from 0; {number} is none")
        return self._originals[number]

    def tool_info(self) -> ToolInfo:
        """See :class:`Tool`."""
        block = {"type": "integer", "description": "The number in <block_N>."}
        return {
            "type": "function",
            "function": {
                "name": self.NAME,
                "description": "Returns the full text of a condensed block.",
                "parameters": {"type": "object", "properties": {"block": block}, "required": ["block"]},
            },
        }
