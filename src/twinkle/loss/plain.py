"""A function as a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Loss, Tensors


class PlainLoss(Loss):
    """Calls ``function(inputs, outputs, **kwargs)``, which gives a scalar tensor or a ``LossOutput``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: Any) -> LossOutput:
        """The function's value; a bare scalar counts as a mean."""
        result = self.function(inputs, outputs, **kwargs)
        return LossOutput(loss=result, num_tokens=1) if isinstance(result, torch.Tensor) else result
