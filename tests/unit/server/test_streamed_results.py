"""Large results leave in pieces: a poll that nobody reads holds one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi.responses import StreamingResponse

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.server.results import PIECE_BYTES, result_response
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore


class Counted(FolderStore):
    """Counts what is read."""

    num_bytes = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.num_bytes += len(data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        self.num_bytes += len(data)
        return data


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    pool = Threads("results", 1)
    yield pool
    pool.stop()


def stored(store: FolderStore, data: bytes) -> Payload:
    store.put("results/2026-01-01/a/b", data)
    return Payload(blob="results/2026-01-01/a/b", blob_bytes=len(data))


async def test_a_large_result_is_read_as_it_is_sent(tmp_path: Path, threads: Threads) -> None:
    store, data = Counted(tmp_path), bytes(range(256)) * 52_001
    response = await result_response(threads, store, stored(store, data), media_type="application/x-protobuf")
    assert isinstance(response, StreamingResponse)
    held = store.num_bytes

    sent = [bytes(piece) async for piece in response.body_iterator]  # type: ignore[arg-type]

    assert held == PIECE_BYTES
    assert max(map(len, sent)) == PIECE_BYTES
    assert b"".join(sent) == data
    assert response.headers["content-length"] == str(len(data))


async def test_a_small_result_is_one_answer_and_a_missing_one_is_said_before_anything_is_sent(
    tmp_path: Path, threads: Threads
) -> None:
    store = Counted(tmp_path)

    small = await result_response(threads, store, stored(store, b"x" * PIECE_BYTES), media_type="application/json")
    assert small.body == b"x" * PIECE_BYTES
    gone = Payload(blob="results/2026-01-01/a/gone", blob_bytes=PIECE_BYTES + 1)
    with pytest.raises(StorageUnavailable):
        await result_response(threads, store, gone, media_type="application/json")
