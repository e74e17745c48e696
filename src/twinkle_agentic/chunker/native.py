"""Where scripts import it from."""

from twinkle_agentic.chunker import NativeChunker

__all__ = ["NativeChunker"]
