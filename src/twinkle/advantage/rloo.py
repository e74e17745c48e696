"""Leave-one-out advantages.

Shapes: N answers, G groups, K answers a group.
"""

from __future__ import annotations

import torch

from twinkle.advantage.base import Advantage, Rewards, Scale, centered, check_scale, grouped
from twinkle.advantage.grpo import scaled
from twinkle.core.errors import InvalidInput


class RLOOAdvantage(Advantage):
    """``r`` minus the mean reward of the other K - 1 answers to its prompt (arXiv 2402.14740).

    Then divided as in ``GRPOAdvantage``, by the deviation of the rewards.
    """

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "group", **kwargs: object
    ) -> torch.Tensor:
        """Advantages (N,)."""
        check_scale(scale)
        if num_generations < 2:
            raise InvalidInput("num_generations", f"is {num_generations}; leaving one out needs at least 2")
        rewards_GK = grouped(rewards, num_generations)
        # r - (sum - r) / (K - 1) is r minus the group's mean, times K / (K - 1).
        advantages_GK = centered(rewards_GK) * num_generations / (num_generations - 1)
        return scaled(advantages_GK, rewards_GK, scale)
