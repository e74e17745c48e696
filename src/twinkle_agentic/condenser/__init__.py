"""Long conversations made shorter: passages taken apart (``chunker``) and said briefly by a model."""

from twinkle_agentic.condenser.chunks import Chunk, Chunks, Condenser
from twinkle_agentic.condenser.model import ModelCondenser

__all__ = ["Chunk", "Chunks", "Condenser", "ModelCondenser"]
