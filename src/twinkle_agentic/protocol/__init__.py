"""Models behind an address instead of in this process."""

from twinkle_agentic.protocol.base import API
from twinkle_agentic.protocol.openai import OpenAI

__all__ = ["API", "OpenAI"]
