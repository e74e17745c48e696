"""Models behind an address instead of in this process."""

from twinkle_agentic.protocol.openai import API, OpenAI

__all__ = ["API", "OpenAI"]
