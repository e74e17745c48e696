"""A conversation in passages, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

BLOCK = "<block_{number}>\n{text}\n</block_{number}>"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A passage of one message."""

    content: str
    role: str
    round: int
    """The number of its message."""
    original: str | None = None
    """What it was before it was condensed; none if it is as it was."""

    def condensed(self, text: str) -> Chunk:
        """The passage in fewer words."""
        return replace(self, content=text, original=self.content if self.original is None else self.original)


@dataclass(frozen=True)
class Chunks:
    """The passages of a conversation, and its messages."""

    chunks: tuple[Chunk, ...]
    messages: tuple[Mapping[str, Any], ...]

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.chunks)

    def replaced(self, chunks: Iterable[Chunk]) -> Chunks:
        """The same conversation with other passages."""
        return Chunks(tuple(chunks), self.messages)

    def to_trajectory(self) -> dict[str, Any]:
        """The conversation; what was condensed stands in numbered blocks, by which its original can be asked for."""
        texts: dict[int, list[str]] = {}
        number = 0
        for chunk in self.chunks:
            text = chunk.content
            if chunk.original is not None:
                text = BLOCK.format(number=number, text=text)
                number += 1
            texts.setdefault(chunk.round, []).append(text)
        messages = [
            {**message, "content": "".join(texts[index])} if index in texts else dict(message)
            for index, message in enumerate(self.messages)
        ]
        return {"messages": messages}

    def originals(self) -> list[str]:
        """What the numbered blocks were."""
        return [chunk.original for chunk in self.chunks if chunk.original is not None]
