"""Answers that are written part by part: each is made when the one before it has left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from fastapi import Response
from fastapi.responses import StreamingResponse

from twinkle.server.answering.turns import PIECE_BYTES
from twinkle.server.errors import JSON
from twinkle.server.threads import Threads


async def answer_in_parts(threads: Threads, pieces: Iterator[bytes], *, result_bytes: int) -> Response:
    """The answer that these pieces of JSON are; a small one is whole. They are made in threads.

    Args:
        threads: Where.
        pieces: In order.
        result_bytes: What they are made of.
    """
    if result_bytes <= PIECE_BYTES:
        return Response(await threads.run(b"".join, pieces), media_type=JSON)
    # What is wrong with the first is said before anything is sent.
    first = await threads.run(next, pieces)
    return StreamingResponse(_sent(threads, first, pieces), media_type=JSON)


async def _sent(threads: Threads, first: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    piece: bytes | None = first
    while piece is not None:
        yield piece
        piece = await threads.run(_next_of, pieces)


def _next_of(pieces: Iterator[bytes]) -> bytes | None:
    return next(pieces, None)
