"""What is written down is what was measured."""

from __future__ import annotations

import importlib
import random
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def measures() -> ModuleType:
    return importlib.import_module("measures")


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (95, 95), (99, 99), (100, 100), (0.5, 1)])
def test_a_percentile_is_the_nearest_rank(measures: ModuleType, percent: float, expected: float) -> None:
    values = list(range(1, 101))
    random.Random(0).shuffle(values)

    assert measures.percentile(values, percent) == expected


def test_a_single_value_is_all_of_its_percentiles(measures: ModuleType) -> None:
    assert [measures.percentile([7.0], percent) for percent in (1, 50, 99)] == [7.0] * 3


def test_no_values_have_no_percentile(measures: ModuleType) -> None:
    with pytest.raises(ValueError, match="no values"):
        measures.percentile([], 50)
    assert measures.latency_summary([]) == {"count": 0}


def test_a_summary_is_in_milliseconds(measures: ModuleType) -> None:
    summary = measures.latency_summary([0.010, 0.020, 0.030])

    assert summary == {"count": 3, "mean_ms": 20.0, "p50_ms": 20.0, "p95_ms": 30.0, "p99_ms": 30.0}


def test_the_median_of_rounds_keeps_their_shape(measures: ModuleType) -> None:
    rounds = [{"ops": 10.0, "by_kind": {"p50": kind}, "name": "x"} for kind in (3.0, 1.0, 2.0)]

    assert measures.median_of(rounds) == {"ops": 10.0, "by_kind": {"p50": 2.0}}


def test_numbers_keep_four_digits(measures: ModuleType) -> None:
    assert measures.rounded(1234.567) == 1235.0
    assert measures.rounded(0.00123456) == 0.001235
