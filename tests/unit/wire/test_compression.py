"""Compressed bodies open within bounds."""

from __future__ import annotations

import pytest
import zstandard

from harness.measured import traced_peak_bytes
from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.wire.compression import decompress

BODY = bytes(range(256)) * 100
WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False)


@pytest.mark.parametrize("compressor", [zstandard.ZstdCompressor(), WITHOUT_SIZE])
def test_a_frame_opens_up_to_the_limit(compressor: zstandard.ZstdCompressor) -> None:
    raw = compressor.compress(BODY)

    assert decompress(raw, len(BODY)) == BODY
    with pytest.raises(TooLarge):
        decompress(raw, len(BODY) - 1)


@pytest.mark.parametrize("compressor", [zstandard.ZstdCompressor(), WITHOUT_SIZE])
def test_an_empty_body_is_empty(compressor: zstandard.ZstdCompressor) -> None:
    assert decompress(compressor.compress(b""), 10) == b""


@pytest.mark.parametrize("compressor", [zstandard.ZstdCompressor(), WITHOUT_SIZE])
def test_a_damaged_frame_is_refused(compressor: zstandard.ZstdCompressor) -> None:
    raw = compressor.compress(BODY)

    for damaged in (raw[:-3], raw + b"more", raw[1:], b"", BODY):
        with pytest.raises(InvalidInput):
            decompress(damaged, 10 * len(BODY))


@pytest.mark.parametrize("compressor", [zstandard.ZstdCompressor(level=19), WITHOUT_SIZE])
def test_a_bomb_is_stopped_near_the_limit(compressor: zstandard.ZstdCompressor) -> None:
    bomb = compressor.compress(bytes(256 << 20))

    def open_it() -> None:
        with pytest.raises(TooLarge):
            decompress(bomb, 1 << 20)

    assert traced_peak_bytes(open_it) < 16 << 20
