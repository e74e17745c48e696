"""What an advantage estimate is: rewards of groups of answers in, one number an answer out.

Shapes: N answers, G groups, K answers a group (``num_generations``), F reward functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from twinkle.core.errors import InvalidInput

Scale = Literal["group", "batch", "none"]
Rewards = torch.Tensor | Sequence[float] | Sequence[Sequence[float]]

EPSILON = 1e-8
"""Added to a standard deviation before dividing by it."""


class Advantage(ABC):
    """A callable on rewards; answers to one prompt stand next to each other."""

    @abstractmethod
    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "group", **kwargs: Any
    ) -> torch.Tensor:
        """Advantages (N,) in float32."""


def grouped(rewards: Rewards, num_generations: int) -> torch.Tensor:
    """Rewards (G, K) in float64; several rewards an answer, (N, F), are summed."""
    try:
        rewards_N = torch.as_tensor(rewards, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput("rewards", f"are no numbers, or not as many for each answer: {error}") from error
    if rewards_N.dim() == 2:
        rewards_N = rewards_N.sum(dim=-1)
    if rewards_N.dim() != 1:
        raise InvalidInput("rewards", f"have shape {tuple(rewards_N.shape)}, must be (N,) or (N, functions)")
    wrong = (~rewards_N.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise InvalidInput(
            "rewards", f"hold {rewards_N[wrong[0]].item()} for answer {wrong[0]}, of which no advantage comes; mend it"
        )
    if num_generations < 1 or len(rewards_N) % num_generations:
        raise InvalidInput(
            "num_generations", f"is {num_generations}, must divide the number of rewards, which is {len(rewards_N)}"
        )
    return rewards_N.view(-1, num_generations)


def centered(rewards_GK: torch.Tensor) -> torch.Tensor:
    """Rewards minus their group's mean; exactly 0 where all of a group are equal.

    The mean of equal numbers may be off by a rounding error. Divided by a deviation of the same size that would be an
    advantage of order one, so the first reward is taken off before averaging.
    """
    above_first_GK = rewards_GK - rewards_GK[:, :1]
    return above_first_GK - above_first_GK.mean(dim=1, keepdim=True)


def check_scale(scale: str) -> None:
    """Raise ``InvalidInput`` for a scale that does not exist."""
    if scale not in get_args(Scale):
        raise InvalidInput("scale", f"is {scale!r}, must be one of {', '.join(get_args(Scale))}")


def deviation(values: torch.Tensor, *, dim: int | None = None) -> torch.Tensor:
    """Unbiased standard deviation, over everything or one dimension (kept); 0 for fewer than two values."""
    num_values = values.numel() if dim is None else values.shape[dim]
    if num_values < 2 or values.numel() == 0:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return values.std() if dim is None else values.std(dim=dim, keepdim=True)
