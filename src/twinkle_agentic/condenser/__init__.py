"""Long conversations made shorter: passages taken apart (``chunker``) and said briefly, by a model or by rules."""

from twinkle_agentic.condenser.base import Condenser
from twinkle_agentic.condenser.keyword import KeywordCondenser
from twinkle_agentic.condenser.model import ModelCondenser
from twinkle_agentic.data_format.chunks import Chunk, Chunks

__all__ = ["Chunk", "Chunks", "Condenser", "KeywordCondenser", "ModelCondenser"]
