"""What an API process hears of samples under way: hints, never more. What is true stands in the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from twinkle.core.ids import new_id
from twinkle.scheduler.token_stream import TokenPiece, read_piece

_log = structlog.get_logger()

ScoredToken = tuple[int, float, list[tuple[int, float]]]
"""A token, its logprob, and the likeliest tokens in its place with theirs."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What can be heard of one operation, so that nothing else is kept."""

    num_samples: int
    max_tokens: int
    topk: int | None
    """Alternatives to each token; ``None`` when no scores are wanted at all."""


@dataclass
class HeardSample:
    """The tokens of one sample from its start, without a gap."""

    expected: Expected
    tokens: list[int] = field(default_factory=list)
    unread: list[ScoredToken] = field(default_factory=list)
    """Those that nobody has taken yet."""
    is_disputed: bool = False
    """Whether two messages contradict each other: only the journal knows which is right."""

    def hear(self, piece: TokenPiece) -> bool:
        """Take in what continues the known tokens; whether there was anything."""
        overlap = len(self.tokens) - piece.start
        if self.is_disputed or overlap < 0 or not self._is_complete(piece):
            return False
        known = self.tokens[piece.start : piece.start + len(piece.tokens)]
        if known != piece.tokens[: len(known)]:
            self.is_disputed = True
            return False
        tokens = piece.tokens[overlap : self.expected.max_tokens - piece.start]
        logprobs = [0.0] * len(tokens) if piece.logprobs is None else piece.logprobs[overlap:]
        topk = [[]] * len(tokens) if piece.topk is None else piece.topk[overlap:]
        self.tokens += tokens
        self.unread += zip(tokens, logprobs, topk)  # noqa: B905 - the tokens may have been cut
        return bool(tokens)

    def take(self) -> list[ScoredToken]:
        """What is new since the last call."""
        unread, self.unread = self.unread, []
        return unread

    def _is_complete(self, piece: TokenPiece) -> bool:
        """Whether the scores that are wanted came with it."""
        topk = self.expected.topk
        if topk is None:
            return True
        rows: list[list[tuple[int, float]]] = [[]] * len(piece.tokens) if piece.topk is None else piece.topk
        return piece.logprobs is not None and all(len(row) == topk for row in rows)


class TokenFeed:
    """What was heard of one operation. ``changed`` is set whenever there is more."""

    def __init__(self, expected: Expected, changed: asyncio.Event) -> None:
        self.samples = [HeardSample(expected) for _ in range(expected.num_samples)]
        self._changed = changed

    def hear(self, piece: TokenPiece) -> None:
        """Take note of a piece."""
        if piece.sample < len(self.samples) and self.samples[piece.sample].hear(piece):
            self._changed.set()


class TokenFeeds:
    """Everyone in this process who listens. Lives on one event loop; only :meth:`hear` is for another thread."""

    def __init__(self) -> None:
        self.id = new_id()
        """Under which workers find this process."""
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[str, list[TokenFeed]] = {}

    @contextmanager
    def open(self, expected: Mapping[str, Expected], changed: asyncio.Event) -> Iterator[list[TokenFeed]]:
        """Listen to some operations for as long as the block runs; their feeds, in order."""
        opened = {request_id: TokenFeed(one, changed) for request_id, one in expected.items()}
        for request_id, feed in opened.items():
            self._feeds.setdefault(request_id, []).append(feed)
        try:
            yield list(opened.values())
        finally:
            for request_id, feed in opened.items():
                self._feeds[request_id].remove(feed)
                if not self._feeds[request_id]:
                    del self._feeds[request_id]

    @property
    def num_listeners(self) -> int:
        """How many listen, to how many operations."""
        return sum(map(len, self._feeds.values()))

    def hear(self, lines: list[str]) -> None:
        """Take the lines of a message; those that are no pieces, or of samples nobody listens to, are nothing."""
        pieces = [piece for piece in map(read_piece, lines) if piece is not None]
        if len(pieces) < len(lines):
            _log.debug("tokens.unreadable", count=len(lines) - len(pieces))
        wanted = [piece for piece in pieces if piece.request_id in self._feeds]
        if wanted and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, wanted)

    def _tell(self, pieces: list[TokenPiece]) -> None:
        for piece in pieces:
            for feed in self._feeds.get(piece.request_id, ()):
                feed.hear(piece)
