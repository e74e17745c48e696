"""Rows come from files of all kinds, from folders and from memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from harness.rows import write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, WrongRows

ROWS = [{"text": "one", "number": 1}, {"text": "two", "number": 2}, {"text": "three", "number": 3}]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, ROWS)
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        path.write_text("text,number\n" + "".join(f"{row['text']},{row['number']}\n" for row in ROWS))
    elif kind == "tsv":
        path.write_text("text\tnumber\n" + "".join(f"{row['text']}\t{row['number']}\n" for row in ROWS))
    elif kind == "parquet":
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode()))
    return path


@pytest.mark.parametrize("wrong", [5, "0:5", [0.5], ["1"], [True], slice(3)])
def test_a_slice_that_holds_no_numbers_of_rows_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^data_slice: "):
        DatasetMeta(data=[{"a": 1}], data_slice=wrong)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"data: has columns of different lengths: \{'a': 2, 'b': 1\}"):
        Dataset(DatasetMeta(data={"a": [1, 2], "b": [3]}))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "jsonl.gz"])
def test_a_file_is_read_by_its_kind(tmp_path: Path, kind: str) -> None:
    dataset = Dataset(DatasetMeta(str(write(tmp_path, kind))))

    assert [dataset[index] for index in range(len(dataset))] == ROWS


def test_a_scheme_before_a_path_makes_no_difference(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl")

    assert len(Dataset(DatasetMeta(f"ms://{path}"))) == len(Dataset(DatasetMeta(f"hf://{path}"))) == 3


def test_the_lines_of_a_text_file_are_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("one\ntwo\n")

    assert list(Dataset(DatasetMeta(str(tmp_path / "rows.txt")))) == [{"text": "one"}, {"text": "two"}]


def test_a_word_that_others_read_as_nothing_stays_a_word_in_a_csv(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text\nNA\nnull\n")

    assert [row["text"] for row in Dataset(DatasetMeta(str(tmp_path / "rows.csv")))] == ["NA", "null"]


def test_a_folder_is_read_by_the_kind_of_its_first_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:2])
    write_jsonl(tmp_path / "b.jsonl", ROWS[2:])
    (tmp_path / "c.txt").write_text("not this")
    (tmp_path / "README.md").write_text("nor this")

    assert list(Dataset(DatasetMeta(str(tmp_path)))) == ROWS


def test_a_saved_data_set_is_read_from_its_folder(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")

    assert list(Dataset(DatasetMeta(str(tmp_path / "saved")))) == ROWS


def test_a_script_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("raise SystemExit('ran')")

    with pytest.raises(InvalidInput, match="never run"):
        Dataset(DatasetMeta(str(tmp_path / "rows.py")))


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        {name: [row[name] for row in ROWS] for name in ("text", "number")},
        generated,
        datasets.Dataset.from_list(ROWS),
    ],
    ids=["rows", "columns", "generator", "hugging-face"],
)
@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_rows_in_memory_are_taken_in_every_form(data: Any, kind: type[Dataset]) -> None:
    assert list(kind(DatasetMeta(data=data))) == ROWS


def test_values_of_several_kinds_stay_what_they_are() -> None:
    rows = [{"data": [["solution", 1]]}, {"data": [["solution", "x"]]}, {"data": {"other": None}}]

    assert list(Dataset(DatasetMeta(data=rows))) == rows


def test_neither_id_nor_data_is_refused_as_scripts_expect() -> None:
    with pytest.raises(ValueError, match="name a data set"):
        DatasetMeta()


def test_a_slice_past_the_end_begins_anew() -> None:
    dataset = Dataset(DatasetMeta(data=ROWS, data_slice=range(1, 8)))

    assert [row["number"] for row in dataset] == [2, 3, 1, 2, 3, 1, 2]


def test_a_slice_names_rows_in_any_order() -> None:
    assert [row["number"] for row in Dataset(DatasetMeta(data=ROWS, data_slice=(2, 0)))] == [3, 1]


def test_a_slice_of_a_stream_wraps_too() -> None:
    dataset = IterableDataset(DatasetMeta(data=ROWS, data_slice=range(1, 8)))

    assert [row["number"] for row in dataset] == [2, 3, 1, 2, 3, 1, 2]


def test_lines_that_are_no_rows_are_named_all_at_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], "", "{broken", ROWS[1], "[1, 2]"])

    with pytest.raises(WrongRows) as raised:
        Dataset(DatasetMeta(str(path)))

    assert [(problem.place.line, problem.reason.split(":")[0]) for problem in raised.value.problems] == [
        (3, "is no JSON"),
        (5, "is a list; a row is an object with columns"),
    ]
    assert str(path) in str(raised.value)


def test_lines_that_are_no_rows_are_left_out_if_asked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], "", "{broken", ROWS[1]])

    dataset = Dataset(DatasetMeta(str(path)), skip_unreadable=True)

    assert list(dataset) == ROWS[:2]
    assert [problem.place.line for problem in dataset.unreadable] == [3]
    assert [dataset.place_of(index).line for index in range(2)] == [1, 4]


def test_what_is_no_data_set_anywhere_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"known are \.jsonl"):
        Dataset(DatasetMeta(str(tmp_path)))
