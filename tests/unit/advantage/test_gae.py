"""Advantages with a critic, against the recursion written out."""

import pytest
import torch

from twinkle.advantage import Advantage, GAEAdvantage
from twinkle.core.errors import InvalidInput

REWARDS = [[0.1, -0.2, 1.0], [0.5]]
VALUES = [[0.3, 0.2, 0.4], [-0.1]]


def by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    found = []
    for start in range(len(rewards)):
        total = 0.0
        for step in range(start, len(rewards)):
            after = values[step + 1] if step + 1 < len(values) else 0.0
            total += (gamma * lam) ** (step - start) * (rewards[step] + gamma * after - values[step])
        found.append(total)
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_advantages_add_up_later_surprises(gamma: float, lam: float) -> None:
    advantages, returns = GAEAdvantage(gamma, lam, normalize=False)(REWARDS, VALUES)
    for row, (rewards, values) in enumerate(zip(REWARDS, VALUES, strict=True)):
        expected = by_hand(rewards, values, gamma, lam)
        assert advantages[row, : len(rewards)].tolist() == pytest.approx(expected)
        assert returns[row, : len(rewards)].tolist() == pytest.approx([a + v for a, v in zip(expected, values)])  # noqa: B905
    assert advantages[1, 1:].tolist() == [0.0, 0.0] and returns[1, 1:].tolist() == [0.0, 0.0]
    assert isinstance(GAEAdvantage(), Advantage)


def test_normalised_advantages_have_mean_0_and_deviation_1_over_all_tokens() -> None:
    advantages, returns = GAEAdvantage()(REWARDS, VALUES)
    kept = torch.cat([advantages[0], advantages[1, :1]])
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6) and float(kept.std(unbiased=False)) == pytest.approx(1)
    assert torch.equal(returns, GAEAdvantage(normalize=False)(REWARDS, VALUES)[1])


def test_masked_tokens_are_passed_over() -> None:
    rewards, values = torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[0.5, 9.0, 0.25]])
    masked, _ = GAEAdvantage(0.9, 0.8, normalize=False)(rewards, values, masks=[[True, False, True]])
    assert masked[0].tolist() == pytest.approx(
        [by_hand([1.0, 2.0], [0.5, 0.25], 0.9, 0.8)[0], 0.0, by_hand([2.0], [0.25], 0.9, 0.8)[0]]
    )


def test_the_reward_comes_with_the_last_token_and_divergence_costs_at_each() -> None:
    built = GAEAdvantage.build_token_rewards([1.0, 2.0], [2, 1])
    assert built == [[0.0, 1.0], [2.0]]
    priced = GAEAdvantage.build_token_rewards(
        torch.tensor([1.0, 2.0]),
        [2, 1],
        old_logps=[[-1.0, -2.0], [-3.0]],
        ref_logps=[[-1.5, -2.0], [-1.0]],
        kl_coef=0.1,
    )
    assert priced[0] == pytest.approx([-0.05, 1.0]) and priced[1] == pytest.approx([2.2])


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(InvalidInput, match="gamma: is 2"):
        GAEAdvantage(gamma=2)
    with pytest.raises(InvalidInput, match="values"):
        GAEAdvantage()([[1.0, 2.0]], [[1.0]])
    with pytest.raises(InvalidInput, match="lengths"):
        GAEAdvantage.build_token_rewards([1.0], [1, 2])
    with pytest.raises(InvalidInput, match="ref_logps"):
        GAEAdvantage.build_token_rewards([1.0], [1], kl_coef=0.1)
    with pytest.raises(InvalidInput, match=r"old_logps\[0\]: has 2"):
        GAEAdvantage.build_token_rewards([1.0], [1], old_logps=[[1.0, 1.0]], ref_logps=[[1.0]])
