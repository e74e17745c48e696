"""A completion may be anything: none hangs the grader, none takes its memory, and the next one is judged as ever."""

import time

import pytest

from twinkle.reward import (
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    MultiModalAccuracyReward,
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
)
from twinkle.reward.grading import FormulaGrader

LONG = 200_000
HOSTILE_TEXTS = [
    "<think>" * LONG,
    "<answer>" * LONG,
    r"\boxed{" * LONG,
    r"\boxed{" * LONG + "}" * LONG,
    "{" * LONG + "}" * LONG,
    "#### " * LONG,
    r"\boxed{" + "9" * LONG + "}",
    r"\boxed{" + "(" * LONG + "}",
    "=" * LONG,
    "\\" * LONG,
    "a " * LONG,
    "\ud83d\x00" * LONG,
]


def trajectory(completion):
    return {
        "messages": [{"role": "assistant", "content": completion}],
        "user_data": [("ground_truth", "2, 3"), ("solution", r"\boxed{2}")],
    }


@pytest.mark.parametrize(
    "make",
    [
        FormatReward,
        GSM8KAccuracyReward,
        GSM8KFormatReward,
        MathReward,
        MultiModalAccuracyReward,
        OlympiadBenchAccuracyReward,
        OlympiadBenchFormatReward,
        OlympiadBenchQualityReward,
    ],
)
def test_whatever_is_written_is_judged_in_time_that_grows_with_its_length_alone(make):
    reward = make()
    began = time.process_time()
    rewards = reward([trajectory(text) for text in HOSTILE_TEXTS])
    assert time.process_time() - began < 10
    assert all(0.0 <= value <= 1.0 for value in rewards)


@pytest.mark.parametrize(
    "formula",
    [
        r"9^{9^{9^{9^{9}}}}",
        r"\sum_{n=1}^{10^{9}} \frac{1}{n^{7}}",
        r"(x+1)^{100000}",
        r"1000000000!!",
    ],
)
def test_a_formula_that_cannot_be_computed_counts_as_wrong_and_the_next_is_judged_as_ever(formula):
    grader = FormulaGrader(seconds=1.0)
    began = time.monotonic()
    assert not grader.are_equal(r"\frac{1}{2}", formula)
    assert time.monotonic() - began < 90
    assert FormulaGrader.are_equal(FormulaGrader(), r"\frac{1}{2}", r"\frac{2}{4}")
    grader.close()


def test_a_grader_that_was_ended_starts_anew():
    grader = FormulaGrader()
    assert grader.are_equal(r"x+y", r"y+x")
    grader._process._process.kill()
    grader._process._process.wait()
    assert grader.are_equal(r"x+y", r"y + x + 0")
    grader.close()
    assert grader.are_equal(r"x+y", r"y + x + 0")
    grader.close()


def test_what_a_formula_would_run_is_never_run(tmp_path):
    target = tmp_path / "mark"
    grader = FormulaGrader()
    for text in (f"__import__('os').mkdir('{target}')", rf"\text{{__import__('os').mkdir('{target}')}}"):
        assert not grader.are_equal("1", text)
    assert not target.exists()
    grader.close()
