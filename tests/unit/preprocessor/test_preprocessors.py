"""Rows of known data sets become trajectories."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import datasets
import pytest

from twinkle.data_format import RowError
from twinkle.preprocessor import (
    PREPROCESSORS,
    AlpacaProcessor,
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    DataFilter,
    EmojiDPOProcessor,
    Filter,
    GSM8KProcessor,
    OlympiadBenchProcessor,
    Preprocessor,
    SelfCognitionProcessor,
)


def one(preprocessor: Preprocessor, row: dict[str, Any]) -> dict[str, Any]:
    columns = preprocessor({name: [value] for name, value in row.items()})
    return {name: values[0] for name, values in columns.items()}


def said(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_a_model_learns_its_name_and_its_author() -> None:
    row = one(SelfCognitionProcessor("Bob", "Alice"), {"query": "Who?", "response": "{{NAME}}, by {{AUTHOR}}."})
    unnamed = one(SelfCognitionProcessor(), {"query": "Who is {{NAME}}?", "response": "{{AUTHOR}}"})

    assert said(row) == [
        ("system", "You are a helpful assistant."),
        ("user", "Who?"),
        ("assistant", "Bob, by Alice."),
    ]
    assert said(unnamed)[1:] == [("user", "Who is twinkle robot?"), ("assistant", "twinkle lab")]


def test_alpaca_puts_the_input_below_the_instruction() -> None:
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}

    assert said(one(AlpacaProcessor(), row)) == [("user", "Add.\n1 2"), ("assistant", "3")]
    assert said(one(AlpacaProcessor(), {**row, "input": ""}))[0] == ("user", "Add.")


def test_competition_problems_are_learned_from_or_answered() -> None:
    row = {"problem": "1+1", "solution": "\\boxed{2}"}

    assert said(one(CompetitionMathProcessor(), row)) == [("user", "1+1"), ("assistant", "\\boxed{2}")]
    asked = one(CompetitionMathGRPOProcessor(), row)
    assert [role for role, _ in said(asked)] == ["system", "user", "assistant"]
    assert said(asked)[2] == ("assistant", "") and asked["user_data"] == [("solution", "\\boxed{2}")]


def test_countdown_asks_for_tags_and_keeps_what_rewards_need() -> None:
    made = one(CountdownProcessor(), {"nums": [1, 2, 3], "target": 6})

    assert made["user_data"] == [{"target": 6, "nums": [1, 2, 3]}]
    system, user = said(made)
    assert system[0] == "system" and all(tag in system[1] for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    assert "[1, 2, 3]" in user[1] and "6" in user[1]
    assert one(CountdownProcessor(), {"nums": [1], "response": 1})["user_data"] == [{"target": 1, "nums": [1]}]


def test_gsm8k_takes_the_number_after_the_mark_as_the_truth() -> None:
    row = {"question": "How many?", "answer": "1000 + 234\n#### 1,234"}

    made = one(GSM8KProcessor(), row)
    learned = one(GSM8KProcessor(system="Be brief.", add_assistant=True), row)

    assert made["user_data"] == [("ground_truth", "1234")]
    assert [role for role, _ in said(made)] == ["system", "user"]
    assert said(learned) == [("system", "Be brief."), ("user", "How many?"), ("assistant", row["answer"])]


def test_preferences_become_two_trajectories() -> None:
    row = {"prompt": "Hi", "answer_zh": "yes", "answer_en": "no", "chosen": "c", "rejected": "r"}

    made = one(EmojiDPOProcessor(), row)
    other = one(EmojiDPOProcessor(system="S", chosen_key="chosen", rejected_key="rejected"), row)

    assert [said(made[name])[2][1] for name in ("positive", "negative")] == ["yes", "no"]
    assert said(other["negative"]) == [("system", "S"), ("user", "Hi"), ("assistant", "r")]


def test_pictures_keep_their_place_before_the_question() -> None:
    made = one(CLEVRProcessor(), {"image": "a.png", "problem": "How many?", "solution": "<answer> 3 </answer>"})

    assert said(made)[1] == ("user", "<image>How many?")
    assert made["images"] == ["a.png"]
    assert made["user_data"] == [("ground_truth", "3"), ("solution", "<answer> 3 </answer>")]


@pytest.mark.parametrize("language", ["zh", "en"])
def test_olympiad_problems_join_context_unit_pictures_and_answers(language: Any) -> None:
    row = {
        "question": "Q",
        "context": "C",
        "unit": "m",
        "final_answer": ["1", "2"],
        "image_1": "a.png",
        "image_2": "b.png",
        "image_3": None,
    }

    made = one(OlympiadBenchProcessor(language=language), row)

    assert made["images"] == ["a.png", "b.png"]
    assert said(made)[1][1].startswith("<image><image>C\nQ\n") and "m" in said(made)[1][1]
    assert made["user_data"] == [("ground_truth", "1, 2")]


@pytest.mark.parametrize(
    ("preprocessor", "row", "told"),
    [
        (
            SelfCognitionProcessor(),
            {"query": "?", "answer": "!"},
            "row 0: response: is missing; the row has query, ans",
        ),
        (SelfCognitionProcessor(), {"query": "?", "response": None}, "row 0: response: is empty, must be text"),
        (GSM8KProcessor(), {"question": "?", "answer": "7"}, "row 0: answer: has no #### with"),
        (CountdownProcessor(), {"nums": "1 2", "target": 3}, "row 0: nums: is '1 2', must be a list"),
        (CountdownProcessor(), {"nums": [1]}, "row 0: target: is missing"),
        (CLEVRProcessor(), {"image": None, "problem": "", "solution": ""}, "row 0: image: is missing"),
        (OlympiadBenchProcessor(), {"question": "?", "final_answer": []}, "row 0: final_answer: is missing"),
    ],
)
def test_a_row_that_does_not_fit_is_told_by_number_and_column(
    preprocessor: Preprocessor, row: dict[str, Any], told: str
) -> None:
    with pytest.raises(RowError) as caught:
        one(preprocessor, row)

    assert str(caught.value).startswith(told)


def test_all_are_found_by_name_and_by_the_documents_modules() -> None:
    for module, names in {
        "twinkle.preprocessor.base": ["Preprocessor", "DataFilter", "Filter"],
        "twinkle.preprocessor.llm": ["SelfCognitionProcessor", "GSM8KProcessor", "CountdownProcessor"],
        "twinkle.preprocessor.dpo": ["EmojiDPOProcessor"],
        "twinkle.preprocessor.mm": ["CLEVRProcessor"],
        "twinkle.preprocessor.olympiad_bench": ["OlympiadBenchProcessor"],
    }.items():
        package = importlib.import_module("twinkle.preprocessor")
        assert all(getattr(importlib.import_module(module), name) is getattr(package, name) for name in names)
    assert len(PREPROCESSORS) == 9 and PREPROCESSORS["CountdownProcessor"] is CountdownProcessor


def test_they_map_and_filter_a_data_set() -> None:
    class Short(DataFilter):
        def __call__(self, row: Mapping[str, Any]) -> bool:
            return len(row["query"]) < 5

    data = datasets.Dataset.from_list(
        [{"query": "Who?", "response": "{{NAME}}"}, {"query": "Whoever?", "response": ""}]
    )

    mapped = data.filter(Short()).map(SelfCognitionProcessor("Bob"), batched=True)

    assert Filter is DataFilter
    assert [said(row)[2] for row in mapped] == [("assistant", "Bob")]


def test_a_class_of_ones_own_overrides_columns_or_rows() -> None:
    class OfColumns(Preprocessor):
        def __call__(self, columns: Mapping[str, Any]) -> dict[str, list[Any]]:
            return self.map_row_to_col(self.map_col_to_row(columns), keys=["b"])

    class OfRows(Preprocessor):
        def preprocess(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"c": row["a"] + row["b"]}

    assert OfColumns()({"a": [1, 2], "b": [3, 4]}) == {"b": [3, 4]}
    assert OfRows()({"a": [1, 2], "b": [3, 4]}) == {"c": [4, 6]}
