"""What the benchmark of the training library makes of its turns."""

from __future__ import annotations

import importlib

import pytest


def test_sides_are_divided_by_the_first_round_by_round() -> None:
    library = importlib.import_module("library")
    theirs, ours = (1.0, 0.2), (0.5, 0.3)
    turns = {"theirs": [([theirs] * 3, 2.0), ([(4.0, 0.2)], 2.0)], "ours": [([ours], 2.001), ([(2.0, 0.5)], 2.0)]}
    found = library.summary(turns)
    assert found["ours"] == {
        "step_ms": 1250.0,
        "of_the_first": 0.5,
        "cpu_ms": 400.0,
        "cpu_of_the_first": 2.0,
        "first_loss": 2.001,
    }
    assert found["theirs"]["of_the_first"] == 1.0


def test_sides_that_trained_something_else_are_no_comparison() -> None:
    library = importlib.import_module("library")
    with pytest.raises(RuntimeError, match="not the same step"):
        library.summary({"theirs": [([(1.0, 1.0)], 2.0)], "ours": [([(0.5, 0.5)], 3.0)]})
