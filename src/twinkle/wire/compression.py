"""Compressed request bodies, opened within bounds."""

from __future__ import annotations

import zstandard

from twinkle.core.errors import InvalidInput, TooLarge

# A frame may ask for this much memory beside its output. The SDK's frames ask for 2 MiB.
_MAX_WINDOW_BYTES = 1 << 23
# A block of four bytes can stand for 128 KiB, so a small bite bounds what one step may produce beyond the limit.
_BITE_BYTES = 128


def decompress(raw: bytes, limit_bytes: int) -> bytes:
    """Opens a zstd frame of at most ``limit_bytes``; raises ``TooLarge`` beyond, ``InvalidInput`` when it is broken."""
    try:
        declared = zstandard.get_frame_parameters(raw).content_size
        if declared not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            if declared > limit_bytes:
                raise _too_large(limit_bytes)
            opened = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompress(
                raw, allow_extra_data=False
            )
        else:
            opened = _decompress_stream(raw, limit_bytes)
    except zstandard.ZstdError as error:
        raise InvalidInput("body", "is not a valid zstd frame") from error
    return opened


def opened_size(raw: bytes, limit_bytes: int) -> int:
    """The most that :func:`decompress` may make of a frame: what it declares, else the limit."""
    try:
        declared = zstandard.get_frame_parameters(raw).content_size
    except zstandard.ZstdError:
        return 0
    if declared in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        return limit_bytes
    return int(declared) if declared <= limit_bytes else 0


def decompress_prefix(raw: bytes, size_bytes: int) -> bytes:
    """The first ``size_bytes`` at most of a frame that may be cut off; empty when it is broken from the start."""
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(raw)
    try:
        return reader.read(size_bytes)
    except zstandard.ZstdError:
        return b""


def _decompress_stream(raw: bytes, limit_bytes: int) -> bytes:
    stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    pieces: list[bytes] = []
    size_bytes = 0
    for start in range(0, len(raw), _BITE_BYTES):
        if stream.eof:
            break
        pieces.append(stream.decompress(raw[start : start + _BITE_BYTES]))
        size_bytes += len(pieces[-1])
        if size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
    if not stream.eof or stream.unused_data:
        raise InvalidInput("body", "is not exactly one complete zstd frame")
    return b"".join(pieces)


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(f"the request body opens to more than {limit_bytes} bytes; send smaller chunks", limit=limit_bytes)
