"""What a condenser is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from twinkle_agentic.data_format.chunks import Chunks


class Condenser(ABC):
    """Says passages in fewer words."""

    @abstractmethod
    def __call__(self, chunks: Chunks, **kwargs: Any) -> Chunks:
        """The conversation, shorter where it could be."""

    def condense_many(self, conversations: Sequence[Chunks], **kwargs: Any) -> list[Chunks]:
        """Several conversations, each for itself; one that can take them together does so here."""
        return [self(chunks, **kwargs) for chunks in conversations]
