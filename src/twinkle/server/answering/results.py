"""Results on their way to a client: large ones go in pieces, each read or written when the one before it has left.

So a poll that nobody reads holds a piece and not the result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from fastapi import Response
from fastapi.responses import StreamingResponse

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.server.answering.turns import PIECE_BYTES
from twinkle.server.errors import JSON
from twinkle.server.threads import Threads
from twinkle.storage.blobs import BlobStore
from twinkle.storage.payloads import read_payload


async def result_response(threads: Threads, blobs: BlobStore, result: Payload, *, media_type: str) -> Response:
    """The answer that holds a result, whatever its size.

    Raises:
        StorageUnavailable: The object store did not answer, or lacks it; nothing was sent.
    """
    if result.inline is not None:
        return Response(result.inline, media_type=media_type)
    if result.size_bytes <= PIECE_BYTES:
        return Response(await threads.run(read_payload, blobs, result), media_type=media_type)
    assert result.blob is not None, "a result is inline or a blob"
    try:
        first = await threads.run(blobs.get_range, result.blob, 0, PIECE_BYTES)
    except KeyError:
        raise StorageUnavailable(f"blob {result.blob} is not in the object store") from None
    pieces = _read(threads, blobs, result.blob, first, result.size_bytes)
    return StreamingResponse(pieces, media_type=media_type, headers={"Content-Length": str(result.size_bytes)})


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
    return StreamingResponse(_written(threads, first, pieces), media_type=JSON)


async def _read(threads: Threads, blobs: BlobStore, key: str, first: bytes, size_bytes: int) -> AsyncIterator[bytes]:
    """The next piece is read when the one before it has left: who does not read holds no more than that."""
    yield first
    for start in range(PIECE_BYTES, size_bytes, PIECE_BYTES):
        yield await threads.run(blobs.get_range, key, start, min(PIECE_BYTES, size_bytes - start))


async def _written(threads: Threads, first: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    piece: bytes | None = first
    while piece is not None:
        yield piece
        piece = await threads.run(_next_of, pieces)


def _next_of(pieces: Iterator[bytes]) -> bytes | None:
    return next(pieces, None)
