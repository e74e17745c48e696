"""Large results leave in pieces: a poll that nobody reads holds one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orjson
import pytest
from fastapi.responses import StreamingResponse

from twinkle.core.errors import StorageUnavailable
from twinkle.core.operation import Payload
from twinkle.server.answering.results import answer_in_parts, result_response
from twinkle.server.answering.turns import PIECE_BYTES
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore
from twinkle.wire.json_pieces import with_array


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


async def test_an_answer_of_many_sequences_is_made_one_after_the_other_as_they_leave(threads: Threads) -> None:
    made: list[int] = []

    def parts() -> Iterator[dict[str, object]]:
        for number in range(5):
            made.append(number)
            yield {"index": number, "text": "a" * number}

    def pieces() -> Iterator[bytes]:
        return with_array({"id": "x"}, "choices", parts(), {"usage": {"total": 5}})

    whole = {"id": "x", "choices": list(parts()), "usage": {"total": 5}}
    small = await answer_in_parts(threads, pieces(), result_bytes=PIECE_BYTES)
    made.clear()
    large = await answer_in_parts(threads, pieces(), result_bytes=PIECE_BYTES + 1)
    assert isinstance(large, StreamingResponse)
    seen = [(bytes(piece), len(made)) async for piece in large.body_iterator]  # type: ignore[arg-type]

    assert orjson.loads(small.body) == orjson.loads(b"".join(piece for piece, _ in seen)) == whole
    assert [num_made for _, num_made in seen] == [0, 1, 2, 3, 4, 5, 5]
    assert orjson.loads(b"".join(with_array({}, "none", [], {}))) == {"none": []}
