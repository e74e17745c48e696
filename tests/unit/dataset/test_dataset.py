"""Rows are mapped, filtered, mixed and encoded, and a wrong one is named."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
from PIL import Image

from harness.rows import conversation, write_jsonl
from twinkle.core.errors import InvalidInput
from twinkle.dataset import Dataset, DatasetMeta, WrongRows
from twinkle.dataset.member import Members
from twinkle.preprocessor import Preprocessor, SelfCognitionProcessor
from twinkle.template import Template

ROWS = [
    {"query": f"Who are you, {index}?", "response": "I am {{NAME}} of {{AUTHOR}}.", "tag": "en"} for index in range(5)
]


def memory(rows: list[dict[str, Any]] | None = None) -> Dataset:
    return Dataset(DatasetMeta(data=ROWS if rows is None else rows))


class Upper(Preprocessor):
    def __init__(self, column: str = "tag") -> None:
        self.column = column

    def __call__(self, columns: Any) -> Any:
        return {self.column: [value.upper() for value in columns[self.column]]}


@pytest.mark.parametrize(
    ("given", "init_args"),
    [
        (SelfCognitionProcessor("Ada", "Charles"), None),
        (SelfCognitionProcessor, {"model_name": "Ada", "model_author": "Charles"}),
        ("SelfCognitionProcessor", {"model_name": "Ada", "model_author": "Charles"}),
    ],
    ids=["object", "class", "name"],
)
def test_a_preprocessor_is_given_as_object_class_or_name(given: Any, init_args: Any) -> None:
    dataset = memory()

    dataset.map(given, init_args=init_args, load_from_cache_file=False, batched=True)

    assert "I am Ada of Charles." in dataset[0]["messages"][-1]["content"]
    assert dataset[0]["tag"] == "en"


def test_columns_are_kept_unless_they_are_removed() -> None:
    dataset = memory()

    dataset.map(Upper(), remove_columns=["query"])

    assert dataset[0] == {"response": ROWS[0]["response"], "tag": "EN"}


def test_a_name_that_is_not_known_is_told_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean SelfCognitionProcessor"):
        memory().map("SelfCognitionProcesor")


def test_a_preprocessor_that_drops_rows_must_return_all_columns() -> None:
    with pytest.raises(InvalidInput, match="made 1 rows of 5, but the column query still has 5"):
        memory().map(lambda columns: {"tag": columns["tag"][:1]})


def test_a_filter_gets_one_row_and_no_columns() -> None:
    with pytest.raises(InvalidInput, match="a filter gets one row"):
        memory().filter(bool, batched=True)


def test_a_filter_that_a_script_tells_of_caches_works_all_the_same() -> None:
    dataset = memory()

    dataset.filter(lambda row: True, load_from_cache_file=False, num_proc=1)

    assert len(dataset) == 5


def test_a_preprocessor_that_drops_rows_and_columns_is_at_fault_and_no_row_is() -> None:
    with pytest.raises(InvalidInput, match="made 0 rows of 5") as raised:
        memory().map(lambda columns: {"tag": []})

    assert not isinstance(raised.value, WrongRows)


def test_rows_that_come_as_tensors_are_plain_values() -> None:
    dataset = Dataset(DatasetMeta(data=datasets.Dataset.from_dict({"n": [1, 2]}).with_format("numpy")))

    assert json.dumps(list(dataset)) == '[{"n": 1}, {"n": 2}]'
    assert str(dataset.place_of(1)) == "data[1]"


def test_a_preprocessor_may_return_fewer_rows() -> None:
    dataset = memory()

    dataset.map(lambda columns: {name: values[::2] for name, values in columns.items()})

    assert [row["query"] for row in dataset] == [ROWS[index]["query"] for index in (0, 2, 4)]


def test_rows_that_a_preprocessor_refuses_are_named_by_line_and_column(tmp_path: Path) -> None:
    rows: list[Any] = [dict(row) for row in ROWS]
    rows[3]["tag"] = None
    dataset = Dataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", ["", *rows]))))

    with pytest.raises(WrongRows, match=r"rows\.jsonl:5: .*'NoneType' object has no attribute 'upper'") as raised:
        dataset.map(Upper())

    assert raised.value.count == 1
    assert raised.value.doing == "mapped by Upper"


def test_errors_cross_process_borders(tmp_path: Path) -> None:
    rows: list[Any] = [dict(row) for row in ROWS]
    rows[3]["tag"] = None

    with pytest.raises(WrongRows, match="upper"):
        memory(rows).map(Upper(), num_proc=2)


def test_a_member_is_chosen_by_its_meta() -> None:
    first, second = DatasetMeta(data=ROWS), DatasetMeta(data=[dict(row) for row in ROWS], data_slice=[0, 1])
    dataset = Dataset(first)
    dataset.add_dataset(second)

    dataset.map(Upper(), dataset_meta=second)
    dataset.mix_dataset(interleave=False)

    assert [row["tag"] for row in dataset] == ["en"] * 5 + ["EN"] * 2


def test_members_take_turns_until_the_shortest_ends() -> None:
    dataset = Dataset(DatasetMeta(data=[{"n": n} for n in range(3)]))
    dataset.add_dataset(DatasetMeta(data=[{"n": n} for n in range(10, 12)]))

    dataset.mix_dataset()

    assert [row["n"] for row in dataset] == [0, 10, 1, 11]


def test_members_that_are_not_mixed_cannot_be_taken_by_number() -> None:
    dataset = memory()
    dataset.add_dataset(DatasetMeta(data=[{"n": 1}]))

    with pytest.raises(InvalidInput, match="2 members; call mix_dataset"):
        dataset[0]


def test_a_filter_says_which_rows_stay() -> None:
    dataset = memory()

    dataset.filter(lambda row: row["query"].endswith(("1?", "3?")))

    assert [row["query"][-2] for row in dataset] == ["1", "3"]


def test_a_row_that_a_filter_refuses_is_named() -> None:
    with pytest.raises(WrongRows, match=r"data\[0\]: missing: is missing"):
        memory().filter(lambda row: row["missing"])


def test_encoded_rows_keep_the_fields_of_their_conversation(template: Template) -> None:
    dataset = memory([{**conversation(n), "user_data": [["ground_truth", str(n)]]} for n in range(3)])
    dataset.set_template(template)

    dataset.encode(batched=True, load_from_cache_file=False)

    expected = template.encode(conversation(1))
    assert dataset[1]["user_data"] == [["ground_truth", "1"]]
    assert dataset[1]["messages"] == conversation(1)["messages"]
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        assert dataset[1][name] == expected[name].tolist()
    assert dataset[1]["length"] == expected["length"]


def test_a_template_is_given_by_name(template_folder: Path) -> None:
    dataset = memory([conversation(1)])

    dataset.set_template("Template", model_id=f"ms://{template_folder}", max_length=512)
    dataset.encode(add_generation_prompt=True)

    assert set(dataset[0]["labels"]) == {-100}


def test_nested_conversations_are_encoded_where_they_are(template: Template) -> None:
    dataset = memory([{"positive": conversation(1), "negative": conversation(2)}])
    dataset.set_template(template)

    dataset.encode()

    assert dataset[0]["negative"]["input_ids"] == template.encode(conversation(2))["input_ids"].tolist()


@pytest.mark.parametrize(("strategy", "rows"), [("delete", 2), ("split", 7), ("left", 3), ("right", 3)])
def test_truncation_may_make_more_or_fewer_rows(
    tmp_path: Path, template_folder: Path, strategy: str, rows: int
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [conversation(1), conversation(2, 300), conversation(3)])
    dataset = Dataset(DatasetMeta(str(path)))
    dataset.set_template("Template", model_id=str(template_folder), max_length=128, truncation_strategy=strategy)
    whole = Template(str(template_folder), max_length=None).encode(conversation(2, 300))["length"]

    dataset.encode()

    assert len(dataset) == (2 + -(-whole // 128) if strategy == "split" else rows)
    assert dataset.place_of(len(dataset) - 1).line == 3


def test_all_rows_that_cannot_be_encoded_are_named_before_anything_is_trained_on(
    tmp_path: Path, template: Template
) -> None:
    rows = [conversation(n) for n in range(300)]
    for number in range(0, 300, 2):
        rows[number] = {"messages": [{"role": "user", "content": None}]}
    rows[1] = conversation(1, 200)
    dataset = Dataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", rows))))
    dataset.set_template(template)

    with pytest.raises(WrongRows) as raised:
        dataset.encode()

    error = raised.value
    assert len(error.problems) == error.count == 100
    assert not error.is_whole
    assert [problem.place.line for problem in error.problems[:3]] == [1, 2, 3]
    assert error.problems[0].column.startswith("messages[0]")
    assert "max_length is 64" in error.problems[1].reason


def test_wrong_rows_are_the_same_when_several_processes_encode(tmp_path: Path, template: Template) -> None:
    rows = [conversation(1), {"messages": []}, conversation(2)]
    dataset = Dataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", rows))))
    dataset.set_template(template)

    with pytest.raises(WrongRows, match=r"rows\.jsonl:2: messages"):
        dataset.encode(num_proc=2)

    dataset.check()
    dataset.encode(num_proc=2)
    assert len(dataset) == 2


def test_check_keeps_what_can_be_encoded(template: Template) -> None:
    dataset = memory([conversation(1), {"messages": [{"role": "nobody", "content": "x"}]}, conversation(2, 500)])
    dataset.set_template(template)

    dataset.check()

    assert [row["messages"] for row in dataset] == [conversation(1)["messages"]]


def test_pictures_stay_bytes_if_asked(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / "a.png")]}).cast_column("image", datasets.Image())
    dataset = Dataset(DatasetMeta(data=rows))

    assert dataset[0]["image"].size == (3, 2)
    dataset.cast_column("image", decode=False)
    assert dataset[0]["image"]["path"].endswith("a.png")
    with pytest.raises(InvalidInput, match="columns are image"):
        dataset.cast_column("picture")


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_rows_are_saved_by_the_name_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "new" / f"rows.{kind}"
    rows = [{"n": n, "list": [n, n + 1]} for n in range(5)]

    memory(rows).save_as(str(path), batch_size=2)

    read = {
        "jsonl": lambda: [json.loads(line) for line in path.read_text().splitlines()],
        "json": lambda: json.loads(path.read_text()),
        "csv": lambda: [
            {"n": int(row["n"]), "list": json.loads(row["list"])} for row in csv.DictReader(path.open(newline=""))
        ],
        "parquet": lambda: pyarrow.parquet.read_table(path).to_pylist(),
    }[kind]()
    assert read == rows


def test_rows_are_saved_as_they_are_taken(tmp_path: Path) -> None:
    dataset = memory([{"n": n} for n in range(5)])

    dataset.save_as(str(tmp_path / "rows.jsonl"), mode="training")
    taken = [dataset[3], dataset[1]]
    dataset.flush_save()
    assert dataset[0] == {"n": 0}

    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == taken


def test_what_is_no_form_of_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="'xlsx' cannot be written"):
        memory().save_as(str(tmp_path / "rows.xlsx"))


def test_the_column_by_which_rows_are_named_is_shown_to_nobody() -> None:
    dataset = memory()
    seen: set[str] = set()

    def look(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        seen.update(columns)
        return dict(columns)

    dataset.map(look)
    dataset.filter(lambda row: bool(seen.update(row) or True))

    assert seen == set(dataset[0]) == set(dataset.column_names) == set(dataset.dataset.column_names) == set(ROWS[0])


def test_what_was_made_of_files_is_removed_with_the_data_set(tmp_path: Path, own_data_cache: Path) -> None:
    dataset = Dataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", ROWS))))
    dataset.map(Upper())
    assert list(own_data_cache.glob("twinkle/run-*/*.arrow"))

    del dataset

    assert not list(own_data_cache.glob("twinkle/run-*"))


def test_a_data_set_goes_to_another_process_without_its_folder(tmp_path: Path, template: Template) -> None:
    dataset = Dataset(DatasetMeta(str(write_jsonl(tmp_path / "rows.jsonl", [conversation(1)]))))
    dataset.set_template(template)
    dataset.encode()

    copy = pickle.loads(pickle.dumps(dataset))

    assert copy[0] == dataset[0]
    assert isinstance(copy, Members) and copy._workspace is None
