"""What chunkers, condensers and scripts of agents hand to each other."""

from twinkle_agentic.data_format.chunks import Chunk, Chunks

__all__ = ["Chunk", "Chunks"]
