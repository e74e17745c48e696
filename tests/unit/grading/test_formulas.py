"""Formulas of graders: what they may hold, what they are, and that none can cost much."""

from __future__ import annotations

import time

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.core.formulas import FormulaFailed, read_formula

NAMES = ("a", "b", "similarity_score")


def value(text: str, **values: float) -> float:
    return read_formula(text, field="calculate_output", names=NAMES).value(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5 * a + 0.5 * b", 1.5),
        ("a + 2 * b^2", 9.0),
        ("-b ** 2", -4.0),
        ("min(a, b, 0.25) + max(a, b)", 2.25),
        ("abs(a - b) / sqrt(4)", 0.5),
        ("floor(2.7) + ceil(0.1) + exp(0) + log(1)", 4.0),
        ("(similarity_score)", 7.0),
        ("1e3", 1000.0),
    ],
)
def test_a_formula_is_computed_as_it_reads(text: str, expected: float) -> None:
    assert value(text, a=1.0, b=2.0, similarity_score=7.0) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["a / b", "log(b)", "sqrt(-a)", "(-8)^(1/3)", "exp(1e9)", "9^9^9^9", "b^-1"])
def test_a_formula_without_a_finite_value_says_so_instead_of_giving_one(text: str) -> None:
    with pytest.raises(FormulaFailed):
        value(text, a=1.0, b=0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("__import__('os').system('true')", "may hold numbers"),
        ("a.__class__", "may hold numbers"),
        ("[a for a in (1,)]", "may hold numbers"),
        ("lambda: a", "may hold numbers"),
        ("a if b else 1", "may hold numbers"),
        ("a < b", "may hold numbers"),
        ("True", "may hold numbers"),
        ("'a' * 999999999", "may hold numbers"),
        ("1j", "may hold numbers"),
        ("a @ b", "may hold numbers"),
        ("a << b", "may hold numbers"),
        ("max(*a)", "may hold numbers"),
        ("max(a, key=b)", "may hold numbers"),
        ("eval(a)", "calls 'eval'"),
        ("flor(a)", "did you mean floor?"),
        ("similarty_score + 1", "did you mean similarity_score?"),
        ("abs(a, b)", "with 2 values"),
        ("min()", "with 0 values"),
        ("a +", "is no formula"),
        ("", "is no formula"),
        ("a; b", "is no formula"),
        ("1" + "0" * 400, "too large"),
        ("a" * 1001, "more than 1000"),
        ("\x00", "is no formula"),
    ],
)
def test_what_is_no_arithmetic_over_its_graders_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_formula(text, field="calculate_output", names=NAMES)
    assert words in refused.value.message


@pytest.mark.parametrize(
    "text",
    ["(" * 499 + "a" + ")" * 499, "-" * 999 + "a", "a" + "+a" * 499, "abs(" * 190 + "a" + ")" * 190, "a" + "^a" * 499],
)
def test_a_formula_that_is_made_to_be_large_or_deep_is_judged_at_once(text: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidInput):
        read_formula(text, field="calculate_output", names=NAMES)
    assert time.monotonic() - started < 1
