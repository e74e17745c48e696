"""Prepared rows: written into shards and taken by number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinkle.core.errors import InvalidInput
from twinkle.jobs.data import (
    DataFormat,
    DataRequest,
    DataRow,
    DataRows,
    DataUse,
    PreparedData,
    TokenSequence,
    read_shard,
    write_shard,
)
from twinkle.storage.blobs import FolderStore
from twinkle.storage.files.prepared import shard_key


def _sequence(*tokens: int, weights: list[float] | None = None, last: int = 0) -> TokenSequence:
    own = np.array(tokens, dtype=np.int32)
    given = np.ones(len(own)) if weights is None else np.array(weights)
    return TokenSequence(own, np.append(own[1:], last).astype(np.int32), given.astype(np.float32))


def _plain(row: DataRow) -> object:
    parts = [(s.input_ids.tolist(), s.target_ids.tolist(), s.weights.tolist()) for s in row.sequences]
    return row.number, parts, row.item, row.line


@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0], [0.0, 0.5, 2.0]])
def test_a_shard_gives_back_the_rows_that_were_written(weights: list[float]) -> None:
    rows = [
        DataRow(7, (_sequence(1, 2, 3, weights=weights, last=9), _sequence(4)), {"answer": "é"}, 12),
        DataRow(8, (_sequence(5, 6), _sequence(151_000, 8, 9))),
    ]

    data = write_shard(rows)

    assert data == write_shard(rows)
    assert [_plain(row) for row in read_shard(data, first=7)] == [_plain(row) for row in rows]


def test_rows_are_taken_by_number_without_the_other_shards(tmp_path: Path) -> None:
    blobs = FolderStore(tmp_path)
    rows = [DataRow(number, (_sequence(number, number + 1),)) for number in range(10)]
    first_rows = (0, 4, 8)
    for number, (start, end) in enumerate([(0, 4), (4, 8), (8, 10)]):
        blobs.put(shard_key("data/day/x", number), write_shard(rows[start:end]))
    prepared = PreparedData(
        digest="d",
        folder="data/day/x",
        use=DataUse.SUPERVISED,
        format=DataFormat.TOKENS,
        num_rows=10,
        num_tokens=20,
        num_trained=20,
        longest=2,
        first_rows=first_rows,
        report={},
    )
    blobs.delete(shard_key("data/day/x", 1))

    found = DataRows(blobs, PreparedData.from_json(prepared.to_json())).rows([9, 0, 3, 0])

    assert [_plain(row) for row in found] == [_plain(rows[number]) for number in (9, 0, 3, 0)]
    with pytest.raises(KeyError):
        DataRows(blobs, prepared).row(5)
    with pytest.raises(IndexError):
        DataRows(blobs, prepared).row(10)


def test_a_request_names_one_source_and_a_truncation_that_there_is() -> None:
    request = DataRequest(tenant="t", model="m", file="file-1")

    with pytest.raises(InvalidInput, match="either a file of yours or a data set"):
        replace(request, dataset="org/name")
    with pytest.raises(InvalidInput, match="either"):
        replace(request, file=None)
    with pytest.raises(InvalidInput, match="split"):
        replace(request, use=DataUse.PREFERENCE, truncation="split")
    assert replace(request, tenant="u", file="file-2").options() == request.options()
