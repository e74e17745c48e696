"""The shipped data sets are what their script writes, and what it writes is right."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(__file__).parents[3] / "examples" / "data"
FILES = ("self_cognition.jsonl", "ada.jsonl", "arithmetic.jsonl")


@pytest.fixture(scope="module")
def make_chat_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_chat_data", DATA / "make_chat_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_the_script_writes_the_shipped_bytes_again(name: str, make_chat_data: ModuleType, tmp_path: Path) -> None:
    make_chat_data.write_all(tmp_path)
    assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_one_question_and_one_answer_and_no_question_occurs_twice(name: str) -> None:
    chats = read(name)
    assert all([message["role"] for message in chat] == ["user", "assistant"] for chat in chats)
    assert all(message["content"].strip() == message["content"] != "" for chat in chats for message in chat)
    questions = [chat[0]["content"] for chat in chats]
    assert len(questions) == len(set(questions))


def test_every_arithmetic_answer_is_right_and_is_about_the_numbers_of_its_question() -> None:
    chats = read("arithmetic.jsonl")
    assert len(chats) == 300
    for question, answer in ((chat[0]["content"], chat[1]["content"]) for chat in chats):
        match = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", answer)
        assert match is not None, answer
        a, sign, b, result = int(match[1]), match[2], int(match[3]), int(match[4])
        assert result == (a + b if sign == "+" else a - b) and result >= 0
        assert sorted(map(int, re.findall(r"\d+", question))) == sorted([a, b])
        adds = re.search(r"\+|plus|[Aa]dd|sum|more", question) is not None
        assert adds == (sign == "+"), question


def test_every_sum_has_its_answer_beside_it_and_none_is_shown_to_the_model(
    make_chat_data: ModuleType, tmp_path: Path
) -> None:
    make_chat_data.write_all(tmp_path)
    shipped = (DATA / "sums.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in shipped.splitlines()]

    assert (tmp_path / "sums.jsonl").read_text(encoding="utf-8") == shipped
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 45
    for row in rows:
        (question,) = row["messages"]
        assert question["role"] == "user"
        a, b = re.findall(r"\d", question["content"])
        assert int(a) + int(b) == int(row["answer"]) in range(4, 10)


def test_self_cognition_names_the_assistant_and_its_author_only_by_placeholder() -> None:
    chats = read("self_cognition.jsonl")
    assert len(chats) >= 150
    placeholders = {found for chat in chats for found in re.findall(r"\{(\w*)\}", chat[1]["content"])}
    assert placeholders == {"name", "author"}
    assert not any("{" in chat[0]["content"] for chat in chats)


def test_ada_is_who_it_says_without_a_placeholder_left() -> None:
    answers = [chat[1]["content"] for chat in read("ada.jsonl")]
    assert not any("{" in answer for answer in answers)
    assert any("Ada" in answer and "the Twinkle team" in answer for answer in answers)
