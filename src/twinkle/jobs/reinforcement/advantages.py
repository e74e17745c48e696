"""How much better than the rest of its group each answer is: the estimators of ``twinkle.advantage``, without torch.

The service's queue never imports the training library, and a step's rewards are a few hundred numbers. Tests hold
both against each other.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

EPSILON = 1e-8

Values = npt.NDArray[np.float64]


def advantages_of(
    rewards: Values, *, estimator: Literal["grpo", "rloo"], scale: Literal["group", "batch", "none"]
) -> Values:
    """Advantages (G, K) of the rewards (G, K) of G groups of K answers.

    ``grpo``: the reward minus the group's mean (DeepSeekMath, arXiv 2402.03300, section 4.1.2). ``rloo``: minus the
    mean of the other answers (arXiv 2402.14740). Both divided by the standard deviation, unbiased, of the group or of
    the batch; with ``none`` by nothing (Dr. GRPO, arXiv 2503.20783).
    """
    num_answers = rewards.shape[1]
    centered = _centered(rewards)
    advantages: Values = centered * (num_answers / (num_answers - 1)) if estimator == "rloo" else centered
    deviation: Values = np.ones((1, 1))
    if scale == "group":
        deviation = centered.std(axis=1, ddof=1, keepdims=True) + EPSILON
    elif scale == "batch":
        deviation = np.full((1, 1), rewards.std(ddof=1) + EPSILON)
    return np.divide(advantages, deviation)


def without_spread(rewards: Values) -> float:
    """The share of groups whose answers all got the same reward: nothing is learnt from them."""
    return float(np.mean(rewards.max(axis=1) == rewards.min(axis=1)))


def _centered(rewards: Values) -> Values:
    """Exactly 0 where all of a group are equal: a mean may be off by a rounding error, which a deviation magnifies."""
    above_first: Values = rewards - rewards[:, :1]
    means: Values = above_first.mean(axis=1, keepdims=True)
    return above_first - means
