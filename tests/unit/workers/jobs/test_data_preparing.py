"""Training data of all forms: what trains of it, what is wrong with it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from harness.data_files import MODEL_LENGTH, DataBench, jsonl
from harness.models import make_text_model
from twinkle.core.errors import InvalidInput
from twinkle.jobs.data import DataFormat, DataUse, TokenSequence
from twinkle.template import Template

QUESTION = {"role": "user", "content": "two and three?"}
ANSWER = {"role": "assistant", "content": "five"}
WRONG = {"role": "assistant", "content": "six"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def template(model: Path) -> Template:
    return Template(str(model), max_length=None)


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> DataBench:
    return DataBench(model, tmp_path)


def _trained(sequence: TokenSequence, template: Template) -> str:
    return template.decode(sequence.target_ids[sequence.weights > 0])


def _read(sequence: TokenSequence, template: Template) -> str:
    return template.decode(sequence.input_ids)


def test_a_conversation_is_encoded_as_scripts_encode_it(bench: DataBench, template: Template) -> None:
    (row,) = bench.rows(jsonl({"messages": [QUESTION, ANSWER]}))

    expected = template.encode({"messages": [QUESTION, ANSWER]})
    tokens, labels = expected["input_ids"], expected["labels"]
    # What comes after the last label trains nobody.
    length = int(np.flatnonzero(labels >= 0)[-1]) + 1
    assert row.sequence.input_ids.tolist() == tokens[: len(row.sequence)].tolist()
    assert len(row.sequence) == max(length, len(tokens) - 1)
    assert row.sequence.target_ids.tolist() == tokens[1 : len(row.sequence) + 1].tolist()
    assert (row.sequence.weights > 0).tolist() == (labels[: len(row.sequence)] >= 0).tolist()
    assert _trained(row.sequence, template).startswith("five")


def test_a_message_of_weight_0_does_not_train(bench: DataBench, template: Template) -> None:
    messages = [QUESTION, {**ANSWER, "weight": 0}, QUESTION, {**WRONG, "weight": 1}]

    (row,) = bench.rows(jsonl({"messages": messages}))

    assert "five" not in _trained(row.sequence, template)
    assert _trained(row.sequence, template).startswith("six")
    assert "five" in _read(row.sequence, template)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]},
        {"prompt": [QUESTION], "chosen": "five", "rejected": "six"},
        {"input": {"messages": [QUESTION]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
    ],
)
def test_preferences_of_all_forms_are_the_same_pair(
    bench: DataBench, template: Template, fields: dict[str, Any]
) -> None:
    (row,) = bench.rows(jsonl(fields), use=DataUse.PREFERENCE)

    assert _trained(row.chosen, template).startswith("five")
    assert _trained(row.rejected, template).startswith("six")
    first = [int(np.flatnonzero(sequence.weights)[0]) for sequence in row.sequences]
    assert row.chosen.input_ids[: first[0]].tolist() == row.rejected.input_ids[: first[1]].tolist()


def test_of_text_with_a_prompt_the_completion_trains_up_to_the_end_of_the_text(
    bench: DataBench, template: Template
) -> None:
    (pair, plain) = (
        bench.rows(jsonl({"prompt": "two and three is", "completion": " five"}))[0],
        bench.rows(jsonl({"text": "two and three is five"}))[0],
    )

    end = template.tokenizer.eos_token
    assert _trained(pair.sequence, template) == f" five{end}"
    assert _read(pair.sequence, template) == "two and three is five"
    # The first token is nobody's target.
    first = template.decode(plain.sequence.input_ids[:1])
    assert first + _trained(plain.sequence, template) == f"two and three is five{end}"


def test_tokens_are_taken_as_they_are_with_labels_or_weights_at_their_own_places(bench: DataBench) -> None:
    rows = bench.rows(
        jsonl({"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"tokens": [5, 6, 7], "weights": [9, 0.5, 0]})
    )

    assert rows[0].sequence.input_ids.tolist() == [5, 6, 7]
    assert rows[0].sequence.target_ids.tolist() == [6, 7, 8]
    assert rows[0].sequence.weights.tolist() == [0, 1, 1]
    assert rows[1].sequence.weights.tolist() == [0.5, 0]


def test_a_prompt_ends_where_the_model_goes_on_and_brings_its_row(bench: DataBench, template: Template) -> None:
    data = jsonl({"messages": [QUESTION], "answer": 5}, {"messages": [QUESTION], "answer": [6]})

    rows = bench.rows(data, use=DataUse.PROMPTS)

    expected = template.encode({"messages": [QUESTION]}, add_generation_prompt=True)["input_ids"]
    assert rows[0].sequence.input_ids.tolist() == expected.tolist()
    assert not rows[0].sequence.weights.any()
    assert [row.item["answer"] for row in rows if row.item is not None] == [5, [6]]


def test_a_row_knows_its_line_whatever_was_passed_over_before_it(bench: DataBench) -> None:
    rows = [{"prompt": "1", "completion": " 1"}, {"prompt": "2", "completion": " 2" * 99}, {"prompt": "3"}]
    rows[2]["completion"] = " 3"
    data = b"\n" + jsonl(*rows)

    found = bench.rows(data, max_length=30, truncation="delete")

    assert [(row.number, row.line) for row in found] == [(0, 2), (1, 4)]


def test_csv_and_parquet_hold_what_jsonl_holds(bench: DataBench) -> None:
    rows = [{"prompt": f"{n} and\n{n},", "completion": f' "{2 * n}"'} for n in range(3000)]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(rows)
    parquet = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet)

    found = [
        [row.sequence.input_ids.tolist() for row in bench.rows(data, name, piece_bytes=40_000)]
        for data, name in (
            (jsonl(*rows), "a.jsonl"),
            (text.getvalue().encode(), "a.csv"),
            (parquet.getvalue(), "a.parquet"),
        )
    ]

    assert len(found[0]) == 3000
    assert found[0] == found[1] == found[2]


def test_every_wrong_line_is_told_with_its_column_and_reason(bench: DataBench) -> None:
    data = b"".join(
        [
            jsonl({"messages": [QUESTION, ANSWER]}),
            b'{"messages": \n',
            b"\n",
            jsonl(
                {"messages": [QUESTION, {"role": "robot", "content": "x"}]},
                {"messages": []},
                {"messages": [QUESTION]},
                {"messages": [QUESTION, {**ANSWER, "weight": 2}]},
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]},
                {"messages": [QUESTION, ANSWER], "images": ["/etc/passwd"]},
            ),
        ]
    )

    outcome = bench.prepare(data)

    assert outcome.prepared is None
    assert (outcome.num_rows, outcome.num_wrong) == (8, 7)
    told = [(problem.line, problem.column) for problem in outcome.problems]
    assert told == [
        (2, ""),
        (4, "messages[1].role"),
        (5, "messages"),
        (6, ""),
        (7, "messages[1].weight"),
        (8, "messages[0].content[0]"),
        (9, "images"),
    ]
    assert outcome.problems[0].character == 14
    assert outcome.problems[3].reason == "has no token that trains"
    assert outcome.details()["errors"][0]["line"] == 2


def test_the_first_hundred_problems_are_told_and_all_are_counted(bench: DataBench) -> None:
    outcome = bench.prepare(jsonl({"text": "fine"}) + b"x\n" * 250)

    assert (outcome.num_wrong, len(outcome.problems)) == (250, 100)


@pytest.mark.parametrize(
    ("truncation", "trained"), [("left", " lost kept"), ("right", ""), ("delete", None), ("split", " lost kept")]
)
def test_what_truncation_cuts_is_counted(
    bench: DataBench, template: Template, truncation: str, trained: str | None
) -> None:
    long = {"prompt": "many words " * 30, "completion": " lost kept"}
    data = jsonl(long, {"prompt": "few", "completion": " words"})

    outcome = bench.prepare(data, max_length=16, truncation=truncation)

    assert outcome.prepared is not None
    report = outcome.prepared.report
    assert report["truncation"]["rows"] == 1
    rows = bench.rows(data, max_length=16, truncation=truncation)
    if trained is None:
        assert len(rows) == 1
    else:
        text = "".join(_trained(row.sequence, template) for row in rows[:-1])
        assert text.removesuffix(template.tokenizer.eos_token) == trained
    assert all(len(row.sequence) <= 16 for row in rows)
    assert (report["truncation"]["training_tokens"] > 0) == (truncation in ("right", "delete"))
    assert (report["truncation"]["tokens"] > 0) == (truncation != "split")
    assert sum(part["rows"] for part in report["tokens"]["histogram"]) == 2
    assert [piece["trains"] for piece in report["preview"][1]["pieces"]] == [False, True]


def test_a_row_that_is_too_long_is_wrong_unless_it_may_be_cut(bench: DataBench) -> None:
    outcome = bench.prepare(jsonl({"text": "word " * 400}))

    assert outcome.prepared is None
    assert f"max_length is {MODEL_LENGTH}" in outcome.problems[0].reason


def test_what_the_rows_are_is_found_or_refused_by_name(bench: DataBench) -> None:
    found = bench.prepare(jsonl({"text": "x y z"})).prepared

    assert found is not None
    assert found.format is DataFormat.TEXT
    with pytest.raises(InvalidInput, match="cannot be told from the first row's columns"):
        bench.prepare(jsonl({"something": 1}))
    with pytest.raises(InvalidInput, match="preference data is preference"):
        bench.prepare(jsonl({"text": "x"}), use=DataUse.PREFERENCE)
    with pytest.raises(InvalidInput, match="has no rows"):
        bench.prepare(b"\n")
    with pytest.raises(InvalidInput, match="of no known kind"):
        bench.prepare(b"x", "data.pickle")
    with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
        bench.prepare(b"no parquet", "data.parquet")
    with pytest.raises(InvalidInput, match=r"os\.system"):
        bench.prepare(jsonl({"text": "x"}), template="os.system")
    with pytest.raises(InvalidInput, match="send one of"):
        bench.prepare(jsonl({"text": "x"}), preprocessor="os.system")
    with pytest.raises(InvalidInput, match="no id of a hub"):
        bench.prepare(b"", file=None, dataset=str(bench.folder))


def test_a_preprocessor_makes_conversations_of_columns(bench: DataBench, template: Template) -> None:
    data = jsonl({"instruction": "add", "input": "2 3", "output": "five"}, {"instruction": "add", "output": 5})

    outcome = bench.prepare(data, preprocessor="AlpacaProcessor")
    (row,) = bench.rows(data, preprocessor="AlpacaProcessor", max_rows=1)

    assert _trained(row.sequence, template).startswith("five")
    assert [(problem.line, problem.column) for problem in outcome.problems] == [(2, "output")]


def test_the_same_data_gives_the_same_bytes(bench: DataBench) -> None:
    data = jsonl(*({"prompt": f"{n}", "completion": f" {n}"} for n in range(5000)))

    first, second = bench.prepare(data), bench.prepare(data, piece_bytes=777)

    assert first.prepared is not None
    assert second.prepared is not None
    assert len(first.prepared.first_rows) == 3
    for number in range(first.num_shards):
        one, other = (bench.blobs.get(f"{each.prepared.folder}/{number:06d}") for each in (first, second))  # type: ignore[union-attr]
        assert one == other
