"""Conversations become rows in which only the assistant's words train."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.chat_templates import save_tokenizer
from twinkle.core.errors import InvalidInput
from twinkle.template import RowError, Template

QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {"role": "assistant", "content": "Let me think."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def template(folder: Path) -> Template:
    return Template(str(folder))


def trained(template: Template, row: dict[str, Any]) -> str:
    return template.decode(row["labels"])


def test_a_row_holds_arrays_of_one_length_and_the_fields_of_its_trajectory(template: Template) -> None:
    row = template.encode({"messages": [QUESTION, ANSWER], "user_data": [("key", "value")]})

    assert row["messages"] == [QUESTION, ANSWER]
    assert row["user_data"] == [("key", "value")]
    assert row["length"] == len(row["input_ids"])
    assert row["position_ids"].tolist() == list(range(row["length"]))
    assert row["attention_mask"].tolist() == [1] * row["length"]
    assert all(isinstance(row[name], np.ndarray) for name in ("input_ids", "labels", "attention_mask", "position_ids"))


def test_labels_are_the_next_tokens_of_the_answer_and_of_its_end(template: Template) -> None:
    row = template.encode({"messages": [QUESTION, ANSWER]})

    is_trained = row["labels"] != -100
    assert row["labels"][:-1][is_trained[:-1]].tolist() == row["input_ids"][1:][is_trained[:-1]].tolist()
    assert row["labels"][-1] == -100
    assert trained(template, row) == "<think>\n\n</think>\n\nLet me think.<|im_end|>"


def test_a_prompt_ends_with_the_head_of_an_answer_and_trains_nothing(template: Template) -> None:
    row = template.encode({"messages": [QUESTION]}, add_generation_prompt=True)

    assert template.decode(row["input_ids"]).endswith("Paris?<|im_end|>\n<|im_start|>assistant\n")
    assert set(row["labels"].tolist()) == {-100}


def test_an_empty_answer_at_the_end_of_a_prompt_is_the_one_to_be_generated(template: Template) -> None:
    with_answer = [QUESTION, {"role": "assistant", "content": ""}]

    row = template.encode({"messages": with_answer}, add_generation_prompt=True)

    assert row["input_ids"].tolist() == template.encode({"messages": [QUESTION]}, True)["input_ids"].tolist()


def test_the_default_system_message_opens_only_a_conversation_that_has_none(folder: Path) -> None:
    template = Template(str(folder), default_system="You are lazy.")

    without = template.format_trajectory({"messages": [QUESTION]})
    own = template.format_trajectory({"messages": [{"role": "system", "content": "You are quick."}, QUESTION]})

    assert without.startswith("<|im_start|>system\nYou are lazy.<|im_end|>")
    assert "lazy" not in own and "quick" in own


def test_only_the_rounds_named_in_the_user_data_train(folder: Path) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "dog"}, QUESTION, {"role": "assistant", "content": "fox"}]

    for user_data in ([("key_rounds", [1])], [["key_rounds", "[1]"]], [{"key_rounds": [1]}]):
        for default_system in (None, "You are lazy."):
            template = Template(str(folder), default_system=default_system)
            row = template.encode({"messages": messages, "user_data": user_data})
            assert trained(template, row) == "dog<|im_end|>"


def test_a_key_round_that_is_no_answer_is_named(template: Template) -> None:
    with pytest.raises(RowError, match=r"user_data.key_rounds: names message 0, which is none of an assistant's"):
        template.encode({"messages": [QUESTION, ANSWER], "user_data": [("key_rounds", [0])]})


def test_without_a_chat_template_all_of_a_text_trains(folder: Path) -> None:
    template = Template(str(folder), use_chat_template=False)

    row = template.encode({"messages": [{"role": "user", "content": "The quick brown fox"}]})

    assert template.decode(row["input_ids"]) == "The quick brown fox"
    assert row["labels"].tolist() == [*row["input_ids"][1:].tolist(), -100]
    assert template.encode({"text": "The quick brown fox"})["input_ids"].tolist() == row["input_ids"].tolist()
    with pytest.raises(RowError, match="must be one user message of plain text"):
        template.encode({"messages": [QUESTION, ANSWER]})


def test_columns_come_back_as_columns_and_rows_as_rows(template: Template) -> None:
    rows = [{"messages": [QUESTION, ANSWER], "id": 1}, {"messages": [QUESTION], "id": 2}]

    from_rows = template.batch_encode(rows)
    from_columns = template.batch_encode({"messages": [row["messages"] for row in rows], "id": [1, 2]})

    assert [row["id"] for row in from_rows] == from_columns["id"] == [1, 2]
    assert from_rows[0]["input_ids"].tolist() == from_columns["input_ids"][0].tolist()


@pytest.mark.parametrize("use_chat_template", [True, False], ids=["conversations", "texts"])
def test_rows_that_are_cut_into_tokens_together_are_those_of_each_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, use_chat_template: bool
) -> None:
    monkeypatch.setattr("twinkle.template.tokenizing.MOST_TOGETHER", 300)
    template = Template(str(folder), use_chat_template=use_chat_template)
    texts = ["Paris", "naïve 🦊 fox", "the quick " * 50, "", "It rains."]
    rows: list[dict[str, Any]] = [{"text": text, "id": number} for number, text in enumerate(texts) if text]
    if use_chat_template:
        whole = [{"messages": [QUESTION, {"role": "assistant", "content": text}]} for text in texts]
        rows = [*whole, {"positive": whole[1], "negative": whole[2]}, {"messages": [QUESTION]}]

    together = template.batch_encode(rows)

    assert pickle.dumps(together) == pickle.dumps([template.encode(row) for row in rows])


def test_of_many_rows_the_first_that_is_wrong_is_told_whatever_it_is_that_is_wrong(folder: Path) -> None:
    too_long = {"messages": [{"role": "user", "content": "fox " * 40}]}
    unwritable = {"messages": [{"role": "judge", "content": ""}]}

    with pytest.raises(RowError, match=r"row 1: messages: are \d+ tokens"):
        Template(str(folder), max_length=20).batch_encode(
            [{"messages": [{**QUESTION, "content": "?"}]}, too_long, unwritable]
        )


def test_trajectories_within_a_row_are_encoded_each_for_itself(template: Template) -> None:
    chosen, rejected = {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, {**ANSWER, "content": "No."}]}

    (row,) = template.batch_encode([{"positive": chosen, "negative": rejected, "id": 1}])

    assert row["id"] == 1
    assert row["positive"]["input_ids"].tolist() == template.encode(chosen)["input_ids"].tolist()
    assert trained(template, row["negative"]).endswith("No.<|im_end|>")
    with pytest.raises(RowError, match=r"row 0: negative\.messages\[0\]\.role: is 'judge'"):
        template.batch_encode([{"positive": chosen, "negative": {"messages": [{"role": "judge", "content": ""}]}}])


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_a_long_row_loses_its_beginning_or_its_end(folder: Path, strategy: Any) -> None:
    whole = Template(str(folder)).encode({"messages": [QUESTION, ANSWER]})

    row = Template(str(folder), max_length=12, truncation_strategy=strategy).encode({"messages": [QUESTION, ANSWER]})

    kept = whole["input_ids"][-12:] if strategy == "left" else whole["input_ids"][:12]
    assert row["input_ids"].tolist() == kept.tolist()
    assert row["position_ids"].tolist() == list(range(12))
    assert row["labels"][-1] == -100


def test_a_split_row_loses_no_target(folder: Path) -> None:
    whole = Template(str(folder)).encode({"messages": [QUESTION, ANSWER]})
    template = Template(str(folder), max_length=7, truncation_strategy="split")

    rows = template.batch_encode([{"messages": [QUESTION, ANSWER], "id": 1}])

    assert [row["length"] for row in rows[:-1]] == [7] * (len(rows) - 1)
    assert np.concatenate([row["input_ids"] for row in rows]).tolist() == whole["input_ids"].tolist()
    assert np.concatenate([row["labels"] for row in rows]).tolist() == whole["labels"].tolist()
    assert {row["id"] for row in rows} == {1}
    with pytest.raises(InvalidInput, match="use batch_encode"):
        template.encode({"messages": [QUESTION, ANSWER]})


def test_a_long_row_is_an_error_or_deleted(folder: Path) -> None:
    short = {"messages": [{"role": "user", "content": "?"}]}
    batch = [short, {"messages": [QUESTION, ANSWER]}]

    with pytest.raises(RowError, match=r"row 1: messages: are \d+ tokens, max_length is 20"):
        Template(str(folder), max_length=20).batch_encode(batch)
    deleting = Template(str(folder), max_length=20, truncation_strategy="delete")
    assert [row["messages"] for row in deleting.batch_encode(batch)] == [short["messages"]]
    assert deleting.batch_check(batch) == [True, False]


WRONG: list[tuple[dict[str, Any], str, int | None]] = [
    ({}, "messages: is missing", None),
    ({"messages": []}, "messages: is empty", None),
    ({"messages": [QUESTION, {"role": "assistant", "content": 5}]}, r"messages\[1\].content: is a int", 1),
    ({"messages": [{"role": "usr", "content": "x"}]}, r"messages\[0\].role: is 'usr'; send one of", 0),
    ({"messages": [QUESTION, {"role": "assistant"}]}, r"messages\[1\].content: is missing", 1),
    ({"messages": [QUESTION, "no"]}, r"messages\[1\]: is a str", 1),
    ({"messages": [QUESTION, {**ANSWER, "tool_calls": 5}]}, r"messages\[1\].tool_calls: is a int; send a list", 1),
    ({"messages": [QUESTION, ANSWER], "user_data": 5}, "user_data: is a int; send a list of", None),
    ({"messages": [QUESTION, ANSWER], "user_data": "key_rounds"}, "user_data: is a str; send a list of", None),
    ({"messages": [QUESTION, ANSWER], "images": 5}, "images: is a int; send a list of pictures", None),
    ({"messages": [{**QUESTION, "images": "a.png"}]}, r"messages\[0\].images: is a str; send a list", 0),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{}]}]},
        r"messages\[1\].tool_calls\[0\]: names no",
        1,
    ),
    (
        {
            "messages": [
                QUESTION,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        r"messages\[1\].tool_calls\[0\].function.arguments: is no JSON",
        1,
    ),
    ({"messages": [QUESTION], "tools": "[{"}, "tools: is no JSON", None),
]


@pytest.mark.parametrize(("row", "told", "number"), WRONG)
def test_what_is_wrong_with_a_row_is_told_by_field_and_message(
    template: Template, row: dict[str, Any], told: str, number: int | None
) -> None:
    with pytest.raises(RowError, match=told) as caught:
        template.encode(row)

    assert caught.value.message_number == number
    assert not template.check(row)


@pytest.mark.parametrize("row", [None, "hello", [QUESTION]], ids=["none", "text", "messages alone"])
def test_what_is_no_row_at_all_is_told(template: Template, row: Any) -> None:
    with pytest.raises(RowError, match=r"row: is a .*; send an object with messages"):
        template.encode(row)
    with pytest.raises(RowError, match="row 1: row: is a"):
        template.batch_encode([{"messages": [QUESTION]}, row])
    assert not template.check(row)
    with pytest.raises(InvalidInput, match="input_ids: are missing"):
        template.concat_input_feature({"messages": [QUESTION]}, [1])


def test_errors_cross_from_other_processes_whole() -> None:
    error = RowError("messages[1].content", "is missing", message_number=1).at_row(7).within("positive")

    copy = pickle.loads(pickle.dumps(error))

    assert (copy.field, copy.reason, copy.message_number, copy.row) == (
        "positive.messages[1].content",
        "is missing",
        1,
        7,
    )
    assert str(copy) == str(error) == "row 7: positive.messages[1].content: is missing"


def test_settings_outside_their_range_are_named(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="truncation_strategy: is 'middle'"):
        Template(str(folder), truncation_strategy="middle")  # type: ignore[arg-type]
    for max_length in (0, "512"):
        with pytest.raises(InvalidInput, match=f"max_length: is {max_length!r}"):
            Template(str(folder), max_length=max_length)  # type: ignore[arg-type]


def test_the_code_of_a_tokenizer_runs_for_the_operator_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizer(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )

    plain = Template(str(folder), trust_remote_code=True)
    monkeypatch.setenv("TWINKLE_TRUST_REMOTE_CODE", str(folder))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    trusted = Template(str(folder))

    assert type(plain.tokenizer).__name__ != "OwnTokenizer"
    assert type(trusted.tokenizer).__name__ == "OwnTokenizer"
    assert plain.variables == {}
