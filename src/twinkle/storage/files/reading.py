"""A file of the object store as programs read files: from any place, without being in memory as a whole."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from twinkle.core.errors import StorageUnavailable
from twinkle.storage.blobs import BlobStore
from twinkle.storage.files.records import FilePiece

READ_BYTES = 2**20


class StoredBytes(io.RawIOBase):
    """The pieces of a file, one after the other. Blocks; put ``io.BufferedReader`` around it."""

    def __init__(self, blobs: BlobStore, pieces: Sequence[FilePiece]) -> None:
        super().__init__()
        self._blobs = blobs
        self._pieces = [piece for piece in pieces if piece.size_bytes]
        self._starts = [0, *accumulate(piece.size_bytes for piece in self._pieces)]
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._starts[-1]}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        """The place."""
        return self._at

    def readinto(self, buffer: memoryview | bytearray) -> int:  # type: ignore[override]
        """Read some bytes, at most to the end of a piece.

        Raises:
            StorageUnavailable: The object store did not answer, or lacks a piece.
        """
        number = bisect_right(self._starts, self._at) - 1
        if number >= len(self._pieces) or not len(buffer):
            return 0
        start = self._at - self._starts[number]
        length = min(len(buffer), self._starts[number + 1] - self._at)
        data = read_piece(self._blobs, self._pieces[number], start, length)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_piece(blobs: BlobStore, piece: FilePiece, start: int, length: int) -> bytes:
    """A stretch of a piece.

    Raises:
        StorageUnavailable: The object store did not answer, or lacks the piece or its end.
    """
    try:
        data = blobs.get_range(piece.key, start, length)
    except KeyError:
        raise StorageUnavailable(f"blob {piece.key} is not in the object store") from None
    if not data:
        raise StorageUnavailable(f"blob {piece.key} ends at {start} of {piece.size_bytes} bytes")
    return data


def stretches_of(blobs: BlobStore, pieces: Sequence[FilePiece], *, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from ``start`` on, a stretch at a time. Raises as :func:`read_piece` does."""
    before = 0
    for piece in pieces:
        for at in range(max(start - before, 0), piece.size_bytes, READ_BYTES):
            yield read_piece(blobs, piece, at, min(READ_BYTES, piece.size_bytes - at))
        before += piece.size_bytes
