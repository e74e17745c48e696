"""What a chunker is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from twinkle_agentic.data_format.chunks import Chunks


class Chunker(ABC):
    """Takes a conversation apart. One of one's own brings ``__call__``."""

    @abstractmethod
    def __call__(self, trajectory: Mapping[str, Any]) -> Chunks:
        """The passages of a conversation, in their order; put together they are its texts."""
