"""Encoded rows go to their file as whole columns where that is the same, and else the usual way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harness.rows import conversation
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.dataset.token_columns import token_table
from twinkle.template import Template

ROWS = [{**conversation(number, 2 + 9 * (number % 3)), "id": number, "note": None} for number in range(25)]


def encoded(template: Template, rows: list[dict[str, Any]] = ROWS) -> Any:
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template(template)
    dataset.encode(batch_size=4)
    return dataset.dataset


def the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.dataset.steps.token_table", lambda *_: None)


@pytest.mark.parametrize("strategy", ["right", "left", "delete", "split"])
def test_columns_and_their_types_are_those_of_the_usual_way(
    template_folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    template = Template(str(template_folder), max_length=40, truncation_strategy=strategy)

    at_once = encoded(template)
    the_usual_way(monkeypatch)
    usual = encoded(template)

    assert at_once.features == usual.features
    assert at_once.data.table.combine_chunks() == usual.data.table.combine_chunks()


def test_rows_that_were_encoded_before_are_encoded_anew(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = [{**row, "length": -1, "input_ids": [0]} for row in ROWS if row["id"] % 3 != 2]

    at_once = encoded(template, stale)
    the_usual_way(monkeypatch)

    assert at_once[:] == encoded(template, stale)[:]
    assert min(at_once["length"]) > 1


def test_a_template_of_ones_own_may_change_a_row_where_it_is(template_folder: Path) -> None:
    class Loud(Template):
        def encode(self, trajectory: Any, add_generation_prompt: bool = False, **settings: Any) -> Any:
            trajectory["messages"][0]["content"] = trajectory["messages"][0]["content"].upper()
            return super().encode(trajectory, add_generation_prompt, **settings)

    row = encoded(Loud(str(template_folder)), [conversation(1)])[0]

    assert row["messages"][0]["content"] == "WHAT IS 1?"


def test_columns_are_made_at_once_only_where_rows_stay_as_they_are() -> None:
    table = pa.table({"id": [7, 8]})
    before = [{"id": 7}, {"id": 8}]
    tokens = np.arange(3)
    after = [[{**row, "input_ids": tokens, "length": 3}] for row in before]

    made = token_table(table, before, after)

    assert made is not None
    assert made.to_pydict() == {"id": [7, 8], "input_ids": [[0, 1, 2]] * 2, "length": [3, 3]}
    assert token_table(table, before, [after[0], []]) is None
    assert token_table(table, before, [after[0], after[1] * 2]) is None
    assert token_table(table, before, [after[0], [{**after[1][0], "id": 9}]]) is None
    assert token_table(table, before, [after[0], [{**after[1][0], "more": 1}]]) is None
    assert token_table(table, before, [[{**some[0], "pixels": np.zeros((2, 2))}] for some in after]) is None
