"""How alike texts are: the published formulas on examples small enough to work out by hand."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.grading.similarity import MAX_CHARACTERS, METRICS, TextsTooLong, common_subsequence, similarity


@pytest.mark.parametrize(
    ("metric", "given_text", "reference", "expected"),
    [
        # rapidfuzz.fuzz.ratio("this is a test", "this is a test!") is 96.55.
        ("fuzzy_match", "this is a test", "this is a test!", 28 / 29),
        ("fuzzy_match", "abcd", "wxyz", 0.0),
        ("cosine", "a b b", "a a b", 4 / 5),
        ("rouge_1", "the cat was found under the bed", "the cat was under the bed", 12 / 13),
        ("rouge_2", "the cat was found under the bed", "the cat was under the bed", 8 / 11),
        ("rouge_l", "the gunman kill police", "police killed the gunman", 1 / 2),
        ("rouge_3", "a b", "a b", 1.0),
        # Two words of four match in one chunk: P = R = 1/2, and half of (1/2)^3 is taken off.
        ("meteor", "a b x y", "a b c d", 0.5 * (1 - 0.5 * (1 / 2) ** 3)),
        ("meteor", "b a", "a b", 1.0 * (1 - 0.5 * 1)),
        # Runs of one to four: 3 + 2 + 1 + 0 of 4 + 3 + 2 + 1.
        ("gleu", "a b c x", "a b c d", 6 / 10),
        ("bleu", "a b c d", "a b c d", 1.0),
        ("bleu", "a b c x", "a b c d", math.exp(sum(map(math.log, (3 / 4, 3 / 4, 2 / 3, 1 / 2))) / 4)),
        ("bleu", "x y", "a b", 0.0),
    ],
)
def test_a_measure_is_what_its_paper_says(metric: str, given_text: str, reference: str, expected: float) -> None:
    assert similarity(metric, given_text, reference) == pytest.approx(expected)


@given(st.text(max_size=40), st.text(max_size=40))
def test_every_measure_lies_between_zero_and_one(one: str, other: str) -> None:
    for metric in METRICS:
        assert 0 <= similarity(metric, one, other) <= 1


@given(st.text("abc", max_size=12), st.text("abc", max_size=12))
def test_the_longest_common_subsequence_is_that_of_the_table(one: str, other: str) -> None:
    row = [0] * (len(other) + 1)
    for a in one:
        before = list(row)
        for place, b in enumerate(other, start=1):
            row[place] = before[place - 1] + 1 if a == b else max(before[place], row[place - 1])
    assert common_subsequence(one, other) == row[-1]


def test_the_longest_texts_are_compared_quickly_and_longer_ones_not_at_all() -> None:
    one, other = "ab " * (MAX_CHARACTERS // 3), "ba " * (MAX_CHARACTERS // 3)
    started = time.monotonic()
    for metric in METRICS:
        similarity(metric, one, other)
    assert time.monotonic() - started < 5
    with pytest.raises(TextsTooLong):
        similarity("bleu", "a" * (MAX_CHARACTERS + 1), "a")
