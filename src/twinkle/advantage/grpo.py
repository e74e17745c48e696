"""Group relative advantages.

Shapes: N answers, G groups, K answers a group.
"""

from __future__ import annotations

import torch

from twinkle.advantage.base import EPSILON, Advantage, Rewards, Scale, centered, check_scale, deviation, grouped


class GRPOAdvantage(Advantage):
    """``(r - mean of the group) / (std + 1e-8)`` (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    std, unbiased, is of the group or of the whole batch of rewards; ``"none"`` does not divide (Dr. GRPO,
    arXiv 2503.20783). With one answer a prompt there is no group to compare with: ``"group"`` returns the rewards,
    the others subtract the mean of the batch.
    """

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "group", **kwargs: object
    ) -> torch.Tensor:
        """Advantages (N,)."""
        check_scale(scale)
        rewards_GK = grouped(rewards, num_generations)
        if num_generations == 1:
            if scale == "group":
                return rewards_GK.flatten().float()
            # Now the batch is the group.
            return scaled(centered(rewards_GK.t()), rewards_GK, scale)
        return scaled(centered(rewards_GK), rewards_GK, scale)


def scaled(advantages_GK: torch.Tensor, rewards_GK: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Advantages (N,) divided by the rewards' deviation as the scale says."""
    if scale == "group":
        advantages_GK = advantages_GK / (deviation(centered(rewards_GK), dim=1) + EPSILON)
    elif scale == "batch":
        advantages_GK = advantages_GK / (deviation(rewards_GK) + EPSILON)
    return advantages_GK.flatten().float()
