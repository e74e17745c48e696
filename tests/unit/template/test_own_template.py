"""A template of one's own that has ``encode`` alone is asked for each of many rows."""

from __future__ import annotations

from typing import Any

import pytest

from harness.models import make_text_model
from twinkle.template import Template

LONG, SHORT = ({"messages": [{"role": "user", "content": text}]} for text in ("word " * 60, "hi"))


class Marked(Template):
    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> Any:
        return {**super().encode(trajectory, add_generation_prompt), "is_marked": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_text_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_many_rows_are_encoded_by_it_and_checked(folder: str) -> None:
    template = Marked(folder)

    assert [row["is_marked"] for row in template.batch_encode([SHORT, LONG])] == [True, True]
    assert template.batch_encode({"messages": [SHORT["messages"]]})["is_marked"] == [True]
    assert template.batch_check([SHORT, {"messages": "none"}]) == [True, False]


def test_rows_that_are_too_long_are_left_out_where_that_is_wished(folder: str) -> None:
    template = Marked(folder, max_length=20, truncation_strategy="delete")

    assert len(template.batch_encode([LONG, SHORT, LONG])) == 1
