"""Each row of a text file is on the line that an editor shows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from twinkle.dataset import Dataset, DatasetMeta

JSON_LINES = '\n{"a": 1}\n\n\n{"a": 2}\n{"a": 3}'
JSON_ARRAY = '[\n {"a": 1},\n {\n  "a": 2},\n\n {"a": 3}\n]\n'
CSV = 'a,b\n1,"two\nlines"\n\n2,x\n3,"a ""quoted"" one"\n'


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("rows.jsonl", JSON_LINES, [2, 5, 6]),
        ("rows.json", JSON_LINES, [2, 5, 6]),
        ("rows.json", JSON_ARRAY, [2, 3, 6]),
        ("rows.csv", CSV, [2, 5, 6]),
        ("rows.tsv", CSV.replace(",", "\t"), [2, 5, 6]),
        ("rows.txt", "one\ntwo\nthree\n", [1, 2, 3]),
    ],
)
def test_rows_know_their_lines(tmp_path: Path, name: str, text: str, lines: list[int]) -> None:
    (tmp_path / name).write_text(text)

    dataset = Dataset(DatasetMeta(str(tmp_path / name)))

    assert [dataset.place_of(index).line for index in range(len(dataset))] == lines


def test_rows_of_a_compressed_file_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(JSON_LINES.encode()))

    dataset = Dataset(DatasetMeta(str(tmp_path / "rows.jsonl.gz")))

    assert [dataset.place_of(index).line for index in range(3)] == [2, 5, 6]


def test_rows_of_several_files_know_their_file(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 3)):
        lines = [json.dumps({"name": f"{name}{index}"}) for index in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(lines))

    dataset = Dataset(DatasetMeta(str(tmp_path)))

    places = [dataset.place_of(index) for index in range(5)]
    assert [(Path(place.file).name, place.line) for place in places] == [
        ("a.jsonl", 1), ("a.jsonl", 3), ("b.jsonl", 1), ("b.jsonl", 3), ("b.jsonl", 5),
    ]  # fmt: skip


def test_rows_know_their_lines_through_filters_slices_and_mixtures(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"n": index}) for index in range(6)))
    dataset = Dataset(DatasetMeta(str(tmp_path / "a.jsonl"), data_slice=[5, 4, 3, 2]))
    dataset.add_dataset(DatasetMeta(str(tmp_path / "b.jsonl")))
    dataset.filter(lambda row: row["n"] != 4)
    dataset.map(lambda columns: {"n": [n * 10 for n in columns["n"]]})

    dataset.mix_dataset()

    told = [(row["n"], Path(dataset.place_of(i).file).stem, dataset.place_of(i).line) for i, row in enumerate(dataset)]
    assert told == [(50, "a", 6), (0, "b", 1), (30, "a", 4), (10, "b", 2), (20, "a", 3), (20, "b", 3)]
