"""One pass of one adapter on a fused model, whose numbers are compared with the same pass computed another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.training import TrainJob
from twinkle.module.lora import LoraConfig


def one_pass(model: FusedLoraModel, make_datum: Callable[..., Any]) -> tuple[np.ndarray, torch.Tensor]:
    """The logprobs of two sequences, and the adapter's gradient."""
    adapter = model.create_adapter(LoraConfig(rank=4, seed=1))
    for pair in adapter.views.values():
        pair.b.fill_(0.02)
    adapter.publish()
    rng = np.random.default_rng(3)
    data = tuple(make_datum(rng, length) for length in (7, 12))
    (outcome,) = model.forward_backward([TrainJob(adapter, data, "cross_entropy")])
    return np.concatenate(outcome.logprobs), adapter.grad
