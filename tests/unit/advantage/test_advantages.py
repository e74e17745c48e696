"""Advantages against the textbook formulas, group by group."""

import statistics

import pytest
import torch

from twinkle.advantage import GRPOAdvantage, RLOOAdvantage
from twinkle.core.errors import InvalidInput

REWARDS = [0.1, 0.9, 0.4, 2.0, -1.0, 0.3]


def groups(size):
    return [REWARDS[i : i + size] for i in range(0, len(REWARDS), size)]


def divisor(group, scale):
    return {"group": statistics.stdev(group) + 1e-8, "batch": statistics.stdev(REWARDS) + 1e-8, "none": 1.0}[scale]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_group_is_compared_with_its_mean(size, scale):
    expected = [(r - statistics.mean(group)) / divisor(group, scale) for group in groups(size) for r in group]
    assert GRPOAdvantage()(REWARDS, size, scale).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_an_answer_is_compared_with_the_others_of_its_group(size, scale):
    expected = [
        (r - statistics.mean(group[:i] + group[i + 1 :])) / divisor(group, scale)
        for group in groups(size)
        for i, r in enumerate(group)
    ]
    assert RLOOAdvantage()(REWARDS, num_generations=size, scale=scale).tolist() == pytest.approx(
        expected, rel=1e-6, abs=1e-7
    )


def test_one_answer_a_prompt_is_taken_as_it_is_or_compared_with_the_batch():
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    assert GRPOAdvantage()(REWARDS).tolist() == pytest.approx(REWARDS)
    assert GRPOAdvantage()(REWARDS, scale="batch").tolist() == pytest.approx([(r - mean) / std for r in REWARDS])
    assert GRPOAdvantage()(REWARDS, scale="none").tolist() == pytest.approx([r - mean for r in REWARDS])


@pytest.mark.parametrize("estimate", [GRPOAdvantage(), RLOOAdvantage()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_say_nothing(estimate, dtype):
    for reward in (0.1, 0.7, 1 / 3, 1e6 / 7):
        rewards = torch.full((7,), reward, dtype=dtype)
        for scale in ("group", "batch", "none"):
            assert not estimate(rewards, 7, scale).any()


def test_equal_rewards_of_a_whole_batch_say_nothing_without_groups():
    assert not GRPOAdvantage()([1 / 3] * 7, 1, "batch").any()


def test_a_batch_of_one_answer_says_nothing_and_stays_finite():
    assert GRPOAdvantage()([3.0], 1, "batch").tolist() == [0.0]
    assert GRPOAdvantage()([], 2).tolist() == []


def test_several_rewards_an_answer_are_summed():
    two = torch.tensor(REWARDS)[:, None] * torch.tensor([[0.25, 0.75]])
    torch.testing.assert_close(GRPOAdvantage()(two, 3), GRPOAdvantage()(REWARDS, 3))


def test_what_forms_no_groups_is_refused():
    with pytest.raises(InvalidInput, match="num_generations: is 4, must divide the number of rewards, which is 6"):
        GRPOAdvantage()(REWARDS, 4)
    with pytest.raises(InvalidInput, match="num_generations: is 1; leaving one out"):
        RLOOAdvantage()(REWARDS)
    with pytest.raises(InvalidInput, match="scale: is 'std'"):
        GRPOAdvantage()(REWARDS, 2, "std")


@pytest.mark.parametrize("estimate", [GRPOAdvantage(), RLOOAdvantage()])
@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([1.0, float("nan")], "rewards: hold nan for answer 1"),
        ([float("inf"), 0.0], "rewards: hold inf for answer 0"),
        (["a", "b"], "rewards: are no numbers"),
        ([[1.0], [1.0, 2.0]], "rewards: are no numbers, or not as many"),
        ([None, 1.0], "rewards: are no numbers"),
    ],
)
def test_rewards_of_which_no_advantage_comes_are_refused(estimate, rewards, told):
    with pytest.raises(InvalidInput, match=told):
        estimate(rewards, num_generations=2)
