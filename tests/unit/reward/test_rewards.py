"""Rewards: what a right answer is, in each of the ways it may be written."""

import pytest

from twinkle.core.errors import InvalidInput
from twinkle.reward import (
    FormatReward,
    GSM8KAccuracyReward,
    GSM8KFormatReward,
    MathReward,
    MultiModalAccuracyReward,
    OlympiadBenchAccuracyReward,
    OlympiadBenchFormatReward,
    OlympiadBenchQualityReward,
    Reward,
)
from twinkle.reward.answers import boxed_answers


def trajectory(completion, **user_data):
    return {
        "messages": [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": completion}],
        "user_data": list(user_data.items()),
    }


@pytest.fixture(scope="module")
def math_reward():
    return MathReward()


@pytest.fixture(scope="module")
def olympiad():
    return OlympiadBenchAccuracyReward()


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>because</think>\n<answer>4</answer>", 1.0),
        ("<think>because\nof that</think> so <answer>\n4\n</answer> it is", 1.0),
        ("<answer>4</answer>", 0.0),
        ("<think>because</think>", 0.0),
        ("</think><think> </answer><answer>", 0.0),
        ("", 0.0),
    ],
)
def test_a_completion_with_thought_and_answer_has_the_form(completion, reward):
    assert FormatReward()([trajectory(completion)], []) == [reward]


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        (r"so \boxed{42}", "42", 1.0),
        (r"so \boxed{41} no, \boxed{42}", "42", 1.0),
        (r"so \boxed{42} no, \boxed{41}", "42", 0.0),
        (r"\boxed{\text{about }\$1,234.50}", "1234.5", 1.0),
        ("the sum is 7\n#### 1,000", "1000", 1.0),
        ("#### 7\n#### 8", "8", 1.0),
        (r"\boxed{3} #### 8", "8", 0.0),
        ("42", "42", 0.0),
        (r"\boxed{42}" + " " * 600, "42", 0.0),
        (r"\boxed{42.000001}", "42", 1.0),
        (r"\boxed{nan}", "nan", 1.0),
        (r"\boxed{1e999}", "1e999", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"so \boxed{42}", "6 times 7 is 42\n#### 42", 1.0),
    ],
)
def test_a_grade_school_answer_is_the_last_number_where_one_is_expected(completion, truth, reward):
    assert GSM8KAccuracyReward()([trajectory(completion, ground_truth=truth)]) == [reward]


def test_the_form_of_a_grade_school_answer_is_a_box_or_hashes_at_the_end():
    completions = [r"\boxed{1}", "#### 1", "1", r"\boxed{}", r"\boxed{1}" + "." * 500]
    assert GSM8KFormatReward()([trajectory(text) for text in completions]) == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "user_data",
    [[("ground_truth", "42")], [["ground_truth", 42]], [{"ground_truth": "42"}], {"ground_truth": "42"}],
)
def test_truths_are_found_in_every_form_of_user_data(user_data):
    row = {**trajectory(r"\boxed{42}"), "user_data": user_data}
    assert GSM8KAccuracyReward()([row]) == [1.0]


def test_truths_may_come_beside_the_trajectories_one_for_each():
    rows = [trajectory(r"\boxed{1}"), trajectory(r"\boxed{2}")]
    assert GSM8KAccuracyReward()(rows, ["1", "3"]) == [1.0, 0.0]
    assert GSM8KAccuracyReward()(rows, [trajectory("", ground_truth="1"), trajectory("", ground_truth="2")]) == [1, 1]
    assert GSM8KAccuracyReward()(rows) == [0.0, 0.0]
    with pytest.raises(InvalidInput, match="ground_truths"):
        GSM8KAccuracyReward()(rows, ["1"])


def test_the_last_assistant_message_is_judged_also_where_it_comes_in_parts():
    row = trajectory(r"\boxed{1}", ground_truth="2")
    row["messages"] += [
        {"role": "tool", "content": r"\boxed{3}"},
        {"role": "assistant", "content": [{"type": "text", "text": r"\boxed"}, {"type": "text", "text": "{2}"}]},
        {"role": "user", "content": "thanks"},
    ]
    assert GSM8KAccuracyReward()([row, {"messages": []}, {}]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "truth", "reward"),
    [
        (r"\frac{1}{2}", r"0.5", 1.0),
        (r"\dfrac{1}{2}", r"\frac12", 1.0),
        (r"(x+1)^2", r"x^2+2x+1", 1.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\{2, 1\}", r"\{1,2\}", 1.0),
        (r"12", r"1,2", 0.0),
        (r"1234", r"1,234", 1.0),
        (r"3", r"We add and get \boxed{1} and then \boxed{3}.", 1.0),
        (r"4", r"\frac{1}{2}", 0.0),
        (r"", r"", 0.0),
    ],
)
def test_a_formula_is_right_in_whatever_way_it_is_written(math_reward, answer, truth, reward):
    assert math_reward([trajectory(rf"so it is $\boxed{{{answer}}}$", solution=truth)]) == [reward]


def test_the_key_of_the_truth_is_the_scripts_choice():
    assert MathReward(ground_truth_key="gold")([trajectory(r"\boxed{7}", gold="7")]) == [1.0]
    assert MathReward()([trajectory(r"\boxed{7}", gold="7"), trajectory("7", solution="7")]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "data", "reward"),
    [
        ("<think>x</think><answer> 3 </answer>", {"ground_truth": "3"}, 1.0),
        ("<answer>Red Cube</answer>", {"solution": "<answer> red cube </answer>"}, 1.0),
        ("<answer>1/2</answer>", {"ground_truth": "0.5"}, 1.0),
        (r"\boxed{3}", {"ground_truth": "3"}, 1.0),
        ("3", {"ground_truth": "3"}, 0.0),
        ("<answer>4</answer>", {"ground_truth": "3"}, 0.0),
        ("<answer>4</answer>", {}, 0.0),
    ],
)
def test_an_answer_about_a_picture_is_read_between_its_tags(completion, data, reward):
    assert MultiModalAccuracyReward()([trajectory(completion, **data)]) == [reward]


@pytest.mark.parametrize(
    ("completion", "data", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", {"ground_truth": "0.5"}, 1.0),
        (r"\boxed{9.81}", {"ground_truth": "9.8"}, 1.0),
        (r"\boxed{12}", {"ground_truth": "10"}, pytest.approx(0.1839, abs=1e-3)),
        (r"\boxed{-10}", {"ground_truth": "10"}, pytest.approx(0.0, abs=1e-3)),
        (r"\boxed{2}, \boxed{3}", {"ground_truth": "2, 3"}, 1.0),
        (r"\boxed{3, 2}", {"ground_truth": "2, 3"}, 1.0),
        (r"\boxed{2}, \boxed{2}", {"ground_truth": "2, 3"}, 0.5),
        (r"\boxed{(1,2)}", {"ground_truth": "(1,2), (3,4)"}, 0.5),
        ("2", {"ground_truth": "2"}, 0.0),
        (r"\boxed{2}", {}, 0.0),
    ],
)
def test_an_olympiads_answer_earns_credit_for_its_parts_and_for_being_near(olympiad, completion, data, reward):
    assert olympiad([trajectory(completion, **data)]) == [reward]


def test_form_and_quality_of_a_solution_are_between_nothing_and_one():
    good = "First we set x = 2, then y = x + 3 = 5. Therefore z = x * y = 10, and 10/5 - 1 = 1. " * 1
    good += "So the answer is the product of all that we found, which no step of ours has left out. " + r"\boxed{10}"
    bad = "again and again and " * 60
    form, quality = OlympiadBenchFormatReward(), OlympiadBenchQualityReward()
    assert form([trajectory(text) for text in (good, bad, r"\boxed{1} \boxed{2} \boxed{3}")]) == pytest.approx(
        [1.0, 0.0, 0.4]
    )
    (best, worst, empty) = quality([trajectory(text) for text in (good, bad, "")])
    assert 0.75 < best <= 1.0 and 0 <= empty <= worst < 0.5


def test_boxes_are_found_with_what_is_nested_in_them():
    assert boxed_answers(r"\boxed{\frac{1}{2}} and \boxed {x_{1}} \boxed{\{1\}} \boxed{open {") == [
        r"\frac{1}{2}",
        "x_{1}",
        r"\{1\}",
    ]


def test_a_reward_of_ones_own_needs_only_the_call():
    class Brevity(Reward):
        def __call__(self, trajectories, ground_truths):
            return [1.0 / len(row["messages"]) for row in trajectories]

    assert Brevity()([{"messages": [1, 2]}], []) == [0.5]
