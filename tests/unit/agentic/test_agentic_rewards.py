"""Rewards of conversations with tools."""

import pytest

from twinkle_agentic.reward import CoTReward, F1Reward, ToolExploreReward, f1_of


def conversation(*turns, truths=("Paris",)):
    messages = [{"role": "user", "content": "Which city?"}]
    for role, content, *calls in turns:
        messages.append({"role": role, "content": content, **({"tool_calls": [{"id": "1"}]} if calls else {})})
    return {"messages": messages, "user_data": [("ground_truth", truth) for truth in truths]}


def test_words_in_common_count_case_punctuation_and_articles_aside():
    assert f1_of("The city of Paris!", "paris") == pytest.approx(0.5)
    assert f1_of("a, Paris", "PARIS.") == 1.0
    assert f1_of("", "x") == f1_of("y", "x") == 0.0


def test_the_boxed_answer_is_compared_with_each_truth_and_the_best_counts():
    rows = [
        conversation(("assistant", r"It is \boxed{Paris}."), truths=("London", "Paris")),
        conversation(("assistant", "Paris")),
        conversation(("assistant", r"\boxed{Paris}"), truths=()),
        conversation(),
    ]
    assert F1Reward()(rows) == [1.0, 0.0, 0.0, 0.0]
    assert F1Reward(r"answer: (\w+)")([conversation(("assistant", "answer: Rome\nanswer: Paris"))]) == [1.0]
    assert F1Reward()(rows[:1], ["London"]) == [0.0]


@pytest.mark.parametrize(("steps", "reward"), [(0, 0.0), (2, 0.0), (3, 0.3), (6, 0.3), (7, 0.1)])
def test_a_few_numbered_steps_to_a_box_are_rewarded(steps, reward):
    text = "\n".join(f"Step {number}: think" for number in range(1, steps + 1))
    assert CoTReward()([conversation(("assistant", text), ("assistant", r"\boxed{x}"))]) == [reward]
    assert CoTReward()([conversation(("assistant", text))]) == [0.0]


def test_tools_that_worked_are_rewarded_where_the_answer_is_right():
    call = (("assistant", "", True), ("tool", "found it"))
    failed = (("assistant", "", True), ("tool", "Error: there is no tool"))
    right, wrong = ("assistant", r"\boxed{Paris}"), ("assistant", r"\boxed{Rome}")
    rows = [
        conversation(*call, right),
        conversation(*call * 4, right),
        conversation(*failed, right),
        conversation(right),
        conversation(*call, wrong),
    ]
    assert ToolExploreReward()(rows) == [1.0, 0.5, 0.0, 0.0, 0.0]
