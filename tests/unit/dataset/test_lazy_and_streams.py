"""Rows may be made while they are taken, by number or one after the other."""

from __future__ import annotations

import collections
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from harness.rows import conversation, write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset, WrongRows
from twinkle.dataset.problems import StreamBroken
from twinkle.template import Template

MADE: list[int] = []


def note(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    MADE.extend(columns["n"])
    return {"n": [n * 10 for n in columns["n"]]}


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    MADE.clear()


def numbers(count: int, first: int = 0) -> DatasetMeta:
    return DatasetMeta(data=[{"n": n} for n in range(first, first + count)])


def test_lazy_rows_are_mapped_when_they_are_taken() -> None:
    dataset = LazyDataset(numbers(5))
    dataset.map(note)
    assert MADE == []

    assert dataset[3] == {"n": 30}
    assert MADE == [3]


def test_lazy_rows_are_filtered_at_once_after_what_was_mapped_before() -> None:
    dataset = LazyDataset(numbers(5))
    dataset.map(note)

    dataset.filter(lambda row: row["n"] >= 20)

    assert [row["n"] for row in dataset] == [20, 30, 40]


def test_lazy_rows_encode_as_others_do(template: Template) -> None:
    rows = [conversation(n) for n in range(4)]
    eager, lazy = Dataset(DatasetMeta(data=rows)), LazyDataset(DatasetMeta(data=rows))
    for dataset in (eager, lazy):
        dataset.set_template(template)
        dataset.encode()

    assert [row["input_ids"] for row in eager] == [row["input_ids"].tolist() for row in lazy]


def test_a_lazy_row_that_is_wrong_raises_when_it_is_taken(tmp_path: Path, template: Template) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), "", {"messages": []}])
    dataset = LazyDataset(DatasetMeta(str(path)))
    dataset.set_template(template)
    dataset.check()
    dataset.encode()

    assert dataset[0]["length"]
    with pytest.raises(InvalidInput, match=r"rows\.jsonl:3 becomes 0 rows"):
        dataset[1]
    assert [problem.place.line for problem in dataset.report().problems] == [3]


def test_lazy_members_take_turns_until_the_longest_ends() -> None:
    dataset = LazyDataset(numbers(2))
    dataset.add_dataset(numbers(3, first=10))

    dataset.mix_dataset()

    assert len(dataset) == 6
    assert [row["n"] for row in dataset] == [0, 10, 1, 11, 0, 12]
    assert dataset[-1] == {"n": 12}
    with pytest.raises(IndexError):
        dataset[6]


def test_lazy_members_follow_each_other_if_asked() -> None:
    dataset = LazyDataset(numbers(2))
    dataset.add_dataset(numbers(3, first=10))

    dataset.mix_dataset(interleave=False)

    assert [row["n"] for row in dataset] == [0, 1, 10, 11, 12]


def test_a_stream_maps_filters_and_encodes_while_it_is_read(tmp_path: Path, template: Template) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"n": n, **conversation(n)} for n in range(6)])
    dataset = IterableDataset(DatasetMeta(str(path)))
    dataset.map(note)
    dataset.filter(lambda row: row["n"] % 20 == 0)
    dataset.set_template(template)
    dataset.encode()
    assert MADE == []

    rows = list(itertools.islice(dataset, 2))

    assert [row["n"] for row in rows] == [0, 20]
    assert MADE == [0, 1, 2]
    assert rows[1]["length"] == template.encode(conversation(2))["length"]


def test_a_stream_has_no_length_and_no_numbers() -> None:
    dataset: Any = IterableDataset(numbers(3))

    with pytest.raises(TypeError):
        len(dataset)
    with pytest.raises(TypeError):
        dataset[0]
    with pytest.raises(InvalidInput, match="use IterableDataset"):
        Dataset(numbers(3), streaming=True)


def test_a_stream_goes_on_behind_a_wrong_row(tmp_path: Path, template: Template) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), {"messages": []}, conversation(3)])
    dataset = IterableDataset(DatasetMeta(str(path)))
    dataset.set_template(template)
    dataset.encode()
    rows = iter(dataset)

    next(rows)
    with pytest.raises(WrongRows, match=r"rows\.jsonl:2: messages"):
        next(rows)
    assert next(rows)["messages"] == conversation(3)["messages"]


def broken_far_behind(folder: Path) -> Path:
    """A file whose last but one line is no row, beyond what is read at once."""
    rows = [json.dumps({"n": n, "text": "x" * 1000}) for n in range(12_000)]
    path = folder / "rows.jsonl"
    path.write_text("\n".join([*rows, '{"n": oops', json.dumps({"n": -1, "text": ""})]))
    return path


def test_a_broken_line_far_behind_ends_a_stream_by_its_name_and_never_in_silence(tmp_path: Path) -> None:
    rows = iter(IterableDataset(DatasetMeta(str(broken_far_behind(tmp_path)))))
    assert next(rows)["n"] == 0
    with pytest.raises(StreamBroken, match=r"(?s)skip_unreadable=True.*rows\.jsonl:12001"):
        collections.deque(rows, maxlen=0)

    with pytest.raises(StreamBroken):
        next(rows)


def test_a_loader_does_not_take_the_end_of_what_can_be_read_for_the_end(tmp_path: Path) -> None:
    loader = DataLoader(IterableDataset(DatasetMeta(str(broken_far_behind(tmp_path)))), batch_size=1000)

    with pytest.raises(StreamBroken, match=r"rows\.jsonl:12001"):
        collections.deque(loader, maxlen=0)


def test_a_broken_line_far_behind_is_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    dataset = IterableDataset(DatasetMeta(str(broken_far_behind(tmp_path))), skip_unreadable=True)

    assert sum(1 for _ in dataset) == 12_001


@pytest.mark.parametrize(("interleave", "expected"), [(True, [0, 10, 1, 11]), (False, [0, 1, 10, 11, 12])])
def test_streams_are_mixed(interleave: bool, expected: list[int]) -> None:
    dataset = IterableDataset(numbers(2))
    dataset.add_dataset(numbers(3, first=10))

    dataset.mix_dataset(interleave=interleave)

    assert [row["n"] for row in dataset] == expected


def test_a_stream_is_saved_at_once_and_as_it_is_taken(tmp_path: Path) -> None:
    dataset = IterableDataset(numbers(3))

    dataset.save_as(str(tmp_path / "all.jsonl"))
    dataset.save_as(str(tmp_path / "taken.jsonl"), mode="training")
    next(iter(dataset))
    dataset.flush_save()

    read = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("all", "taken")}
    assert [json.loads(line)["n"] for line in read["all"]] == [0, 1, 2]
    assert [json.loads(line)["n"] for line in read["taken"]] == [0]
