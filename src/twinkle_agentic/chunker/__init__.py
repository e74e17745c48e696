"""Messages taken apart into passages."""

from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.chunker.native import NativeChunker

__all__ = ["Chunker", "NativeChunker"]
