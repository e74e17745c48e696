"""Policy gradients whose importance ratio is clipped per token. Thresholds are ratio bounds, not distances from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle.loss.datum import DatumLoss, clip, threshold


@dataclass(frozen=True, kw_only=True)
class Ppo(DatumLoss):
    """``-sum(min(r * A, clip(r, low, high) * A))``.

    Config: ``clip_low_threshold`` 0.8, ``clip_high_threshold`` 1.2 (the Tinker documentation's defaults); a datum may
    bring tensors of these names, which then count instead.
    """

    name: ClassVar[str] = "ppo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The clipped sum."""
        ratio = torch.exp(logprobs - inputs["logprobs"])
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        advantages = inputs["advantages"]
        return -torch.minimum(ratio * advantages, clip(ratio, low, high) * advantages).sum()


@dataclass(frozen=True, kw_only=True)
class Cispo(DatumLoss):
    """``-sum(stop_gradient(clip(r, low, high)) * lp * A)``: clipped tokens keep a gradient.

    Config: ``clip_low_threshold`` 0.0, ``clip_high_threshold`` 4.0 (one-sided, as the Tinker documentation has it now);
    tensors of these names in a datum count instead.
    """

    name: ClassVar[str] = "cispo"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("clip_low_threshold", "clip_high_threshold")
    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum."""
        ratio = torch.exp(logprobs.detach() - inputs["logprobs"])
        low = threshold(inputs, "clip_low_threshold", self.clip_low_threshold)
        high = threshold(inputs, "clip_high_threshold", self.clip_high_threshold)
        return -(clip(ratio, low, high) * logprobs * inputs["advantages"]).sum()
