"""What a tool is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from twinkle.data_format.conversation import Tool as ToolInfo


class Tool(ABC):
    """A function that a model may call, and its description."""

    @abstractmethod
    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """What the model is told of the call's outcome."""

    @abstractmethod
    def tool_info(self) -> ToolInfo:
        """What the model is told of the tool beforehand."""
