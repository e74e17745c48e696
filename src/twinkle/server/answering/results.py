"""Results on their way to a client: large ones go from the store in pieces, so that unread polls hold a piece each."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Response
from fastapi.responses import StreamingResponse

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.server.answering.turns import PIECE_BYTES
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
    pieces = _pieces(threads, blobs, result.blob, first, result.size_bytes)
    return StreamingResponse(pieces, media_type=media_type, headers={"Content-Length": str(result.size_bytes)})


async def _pieces(threads: Threads, blobs: BlobStore, key: str, first: bytes, size_bytes: int) -> AsyncIterator[bytes]:
    """The next piece is read when the one before it has left: who does not read holds no more than that."""
    yield first
    for start in range(PIECE_BYTES, size_bytes, PIECE_BYTES):
        yield await threads.run(blobs.get_range, key, start, min(PIECE_BYTES, size_bytes - start))
