"""Texts cut after paragraphs and sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.reward.base import text_of
from twinkle_agentic.chunker.base import Chunker
from twinkle_agentic.data_format.chunks import Chunk, Chunks

BREAK = re.compile(r"(?<=\n)\n+|(?<=[.!?。！？])\s+")


class NativeChunker(Chunker):
    """Cuts texts after paragraphs and sentences into passages of at most ``chunk_size`` characters.

    A sentence that is longer is cut where it must be. The passages put together are the text, to the character.
    """

    def __init__(self, chunk_size: int = 2000) -> None:
        if chunk_size < 1:
            raise InvalidInput("chunk_size", f"is {chunk_size}; send 1 or more")
        self._size = chunk_size

    def __call__(self, trajectory: Mapping[str, Any]) -> Chunks:
        """The passages of a conversation."""
        messages = tuple(trajectory.get("messages") or ())
        chunks = [
            Chunk(content=passage, role=str(message.get("role")), round=number)
            for number, message in enumerate(messages)
            for passage in self.split(text_of(message.get("content")))
        ]
        return Chunks(tuple(chunks), messages)

    def split(self, text: str) -> list[str]:
        """The passages of a text."""
        ends = [match.end() for match in BREAK.finditer(text)]
        passages = []
        start, last = 0, 0
        for end in [*ends, len(text)]:
            while end - start > self._size:
                cut = last if last > start else start + self._size
                passages.append(text[start:cut])
                start = last = cut
            last = end
        return [*passages, text[start:]] if start < len(text) else passages
