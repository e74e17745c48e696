"""What a model may call."""

from twinkle_agentic.tools.base import Tool
from twinkle_agentic.tools.tool_manager import ToolManager

__all__ = ["Tool", "ToolManager"]
