"""What is wrong with rows, how long they are and what trains is told before a device is busy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.rows import conversation, write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataset import Dataset, DatasetMeta, IterableDataset, LazyDataset
from twinkle.template import Template

NO_TEXT = {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "yes"}]}


def data(path: Path, rows: list[Any], template: Template | None, kind: Any = Dataset) -> Any:
    dataset = kind(DatasetMeta(str(write_jsonl(path / "rows.jsonl", rows))))
    if template is not None:
        dataset.set_template(template)
    return dataset


def test_rows_that_are_fine_are_counted_and_measured(tmp_path: Path, template: Template) -> None:
    rows = [conversation(n, 2 + n % 5) for n in range(30)]
    encoded = [template.encode(row) for row in rows]

    report = data(tmp_path, rows, template).report()

    assert (report.rows, report.num_wrong) == (30, 0)
    assert report.lengths == [row["length"] for row in encoded]
    assert report.training_tokens == sum(int((row["labels"] >= 0).sum()) for row in encoded)
    assert sum(part.count for part in report.histogram()) == 30
    assert report.histogram()[-1].last >= max(report.lengths)
    assert "30 rows, none wrong" in str(report)


def test_the_first_hundred_wrong_rows_are_named_and_all_are_counted(tmp_path: Path, template: Template) -> None:
    rows: list[Any] = ["", *([NO_TEXT, conversation(1)] * 150)]

    report = data(tmp_path, rows, template).report()

    assert (report.rows, report.num_wrong, len(report.problems)) == (300, 150, 100)
    assert [problem.place.line for problem in report.problems[:3]] == [2, 4, 6]
    assert report.problems[0].place.file.endswith("rows.jsonl")
    assert report.problems[0].column == "messages[0].content"
    assert list(report.counts.values()) == [150]
    assert "rows.jsonl:2: messages[0].content: " in str(report)


def test_a_column_that_is_missing_is_named(tmp_path: Path, template: Template) -> None:
    report = data(tmp_path, [{"question": "who?"}], template).report()

    assert [problem.column for problem in report.problems] == ["messages"]


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("raise", "1 row is longer than max_length 64: refused by encode()"),
        ("right", "tokens are cut off (right), "),
        ("left", "tokens are cut off (left), "),
        ("delete", "1 row is longer than max_length 64: deleted, "),
        ("split", "1 row is longer than max_length 64: cut into several rows"),
    ],
)
def test_what_truncation_would_cut_is_told(tmp_path: Path, template_folder: Path, strategy: Any, says: str) -> None:
    template = Template(str(template_folder), max_length=64, truncation_strategy=strategy)
    whole = Template(str(template_folder), max_length=None).encode(conversation(2, 60))

    report = data(tmp_path, [conversation(1), conversation(2, 60)], template).report()

    assert report.cut is not None and report.cut.rows == 1
    assert says in str(report)
    assert report.num_wrong == (strategy == "raise")
    lost = {"raise": 0, "split": 0, "delete": whole["length"]}.get(strategy, whole["length"] - 64)
    assert report.cut.tokens == lost
    if strategy == "right":
        trained = (whole["labels"] >= 0).sum() - (template.encode(conversation(2, 60))["labels"] >= 0).sum()
        assert report.cut.training_tokens == trained > 0


def test_a_preview_marks_the_tokens_that_train(tmp_path: Path, template: Template) -> None:
    report = data(tmp_path, [conversation(7)], template).report()

    trained = "".join(piece.text for piece in report.previews[0].pieces if piece.trains)
    whole = "".join(piece.text for piece in report.previews[0].pieces)
    answer = conversation(7)["messages"][1]["content"]
    assert answer in trained and "What is 7?" not in trained
    assert "What is 7?" in whole
    assert f"{answer}<|im_end|>]]" in str(report)


def test_rows_that_train_nothing_are_counted(tmp_path: Path, template: Template) -> None:
    report = data(tmp_path, [{"messages": [{"role": "user", "content": "hello"}]}], template).report()

    assert report.untrained == 1
    assert "1 row has no token that trains" in str(report)


@pytest.mark.parametrize("kind", [LazyDataset, IterableDataset])
def test_data_sets_that_do_it_later_are_reported_now(tmp_path: Path, template: Template, kind: Any) -> None:
    dataset = data(tmp_path, [{"q": "a b"}, {"q": None}, {"q": "c"}], template, kind)
    dataset.map(lambda columns: {"messages": [[{"role": "user", "content": q.upper()}] for q in columns["q"]]})
    dataset.encode()

    report = dataset.report()

    assert (report.rows, report.num_wrong) == (3, 1)
    assert report.problems[0].place.line == 2
    assert "upper" in report.problems[0].reason


def test_encoded_rows_are_reported_as_they_are(tmp_path: Path, template: Template) -> None:
    dataset = data(tmp_path, [conversation(n) for n in range(4)], template)
    dataset.encode()

    report = dataset.report(limit=3)

    assert report.rows == 3
    assert report.lengths == [dataset[index]["length"] for index in range(3)]
    assert report.previews[0].pieces[-1].text


def test_without_a_template_rows_of_conversations_are_not_judged(tmp_path: Path) -> None:
    report = data(tmp_path, [conversation(1)], None).report()

    assert "set_template" in report.problems[0].reason


def test_unreadable_lines_and_wrong_rows_are_in_one_report_that_programs_can_read(
    tmp_path: Path, template: Template
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ["{oops", NO_TEXT, conversation(1)])
    dataset = Dataset(DatasetMeta(str(path)), skip_unreadable=True)
    dataset.set_template(template)

    told = json.loads(json.dumps(dataset.report().to_dict()))

    assert (told["rows"], told["wrong"]) == (3, 2)
    assert [(problem["line"], problem["column"]) for problem in told["problems"]] == [
        (1, ""),
        (2, "messages[0].content"),
    ]
    assert told["tokens"]["all"] == template.encode(conversation(1))["length"]
    assert told["truncation"] == {"strategy": "raise", "max_length": 64, "rows": 0, "tokens": 0, "training_tokens": 0}
    assert told["preview"][0]["line"] == 3


def test_a_report_changes_nothing(tmp_path: Path, template: Template) -> None:
    dataset = data(tmp_path, [conversation(1, 60), NO_TEXT], template)

    dataset.report()

    assert template.max_length == 64
    assert len(dataset) == 2
    with pytest.raises(InvalidInput):
        dataset.encode()
