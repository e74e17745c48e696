"""The queue's estimates of advantages are the training library's."""

from __future__ import annotations

import numpy as np
import pytest

from twinkle.advantage import GRPOAdvantage, RLOOAdvantage
from twinkle.jobs.reinforcement.advantages import advantages_of, without_spread


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_estimate_is_that_of_the_library(estimator: str, scale: str) -> None:
    rewards_GK = np.random.default_rng(3).choice([0.0, 0.1, 1.0, 7.5], (6, 4))
    rewards_GK[1] = 0.1
    library = {"grpo": GRPOAdvantage, "rloo": RLOOAdvantage}[estimator]()

    expected = library(rewards_GK.flatten().tolist(), num_generations=4, scale=scale)  # type: ignore[arg-type]

    found = advantages_of(rewards_GK, estimator=estimator, scale=scale)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.flatten(), expected.numpy(), rtol=1e-5, atol=1e-7)
    assert not found[1].any()
    assert without_spread(rewards_GK) >= 1 / 6
