"""What a critic learns: the value of each position of a sampled answer.

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import Loss, Tensors, require, token_mean


class PPOValueLoss(Loss):
    """``max((v - R)^2, (v' - R)^2) / 2``, mean over tokens; v' is v held within ``epsilon`` of the old value.

    R is the return (GAE's advantage plus the old value). The bound on how far the critic moves in a round is that of
    the implementations that go with arXiv 1707.06347.
    """

    require_logps: ClassVar[bool] = False
    require_values: ClassVar[bool] = True

    def __init__(self, epsilon: float = 0.2, ignore_index: int = -100) -> None:
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        *,
        old_values: Rows | None = None,
        returns: Rows | None = None,
        **kwargs: object,
    ) -> LossOutput:
        """The loss of the batch: ``outputs["values"]`` are (B, T); the others come in any form ``align`` takes."""
        values_BT, mask_BT = predicted_values(inputs, outputs, self.ignore_index)
        if old_values is None or returns is None:
            missing = "old_values" if old_values is None else "returns"
            raise InvalidInput(
                missing, "are missing; send the critic's values of the round, and GAEAdvantage's returns"
            )
        old_BT = align("old_values", old_values, mask_BT, like=values_BT)
        returns_BT = align("returns", returns, mask_BT, like=values_BT)
        held_BT = old_BT + (values_BT - old_BT).clamp(-self.epsilon, self.epsilon)
        loss_BT = torch.maximum((values_BT - returns_BT).square(), (held_BT - returns_BT).square()) / 2
        return LossOutput(loss=token_mean(loss_BT, mask_BT), num_tokens=1)


def predicted_values(inputs: Tensors, outputs: Tensors, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A critic's values (B, T), at least float32, and the mask of the trained positions."""
    mask_BT = torch.atleast_2d(require(inputs, "labels", where="inputs")) != ignore_index
    values_BT = require(outputs, "values", where="outputs")
    if values_BT.dim() == 3:
        values_BT = values_BT.squeeze(-1)
    values_BT = torch.atleast_2d(values_BT)
    if values_BT.shape != mask_BT.shape:
        raise InvalidInput("outputs.values", f"have shape {tuple(values_BT.shape)}, labels {tuple(mask_BT.shape)}")
    return values_BT.to(torch.promote_types(values_BT.dtype, torch.float32)), mask_BT
