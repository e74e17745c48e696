"""Group sequence policy optimisation: one importance ratio for a whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle.loss.datum import DatumLoss, clip, threshold


@dataclass(frozen=True, kw_only=True)
class Gspo(DatumLoss):
    """PPO's clipped objective with ``s = exp(mean(lp - q))`` over ``sequence_ratio_mask != 0`` in place of r.

    Each token's ratio is ``stop_gradient(s) * exp(lp - stop_gradient(lp))``: the value is s, the gradient goes to the
    token. A datum is one sequence. Config: ``clip_low_threshold`` 1 - 3e-4, ``clip_high_threshold`` 1 + 4e-4, the
    values of the GSPO paper (arXiv 2507.18071); tensors of these names in a datum count instead.
    """

    name: ClassVar[str] = "gspo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages", "sequence_ratio_mask")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    separable: ClassVar[bool] = False
    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The clipped sum."""
        fixed = logprobs.detach()
        counted = inputs["sequence_ratio_mask"] != 0
        log_ratio = torch.where(counted, fixed - inputs["logprobs"], torch.zeros_like(fixed))
        sequence_ratio = torch.exp(log_ratio.sum() / counted.sum().clamp(min=1))
        ratio = sequence_ratio * torch.exp(logprobs - fixed)
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        advantages = inputs["advantages"]
        return -torch.minimum(ratio * advantages, clip(ratio, low, high) * advantages).sum()
