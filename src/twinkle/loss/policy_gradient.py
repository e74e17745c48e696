"""Importance-weighted policy gradients without a clip, and the fallback for ``stable_reinforce``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle.loss.datum import DatumLoss


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(DatumLoss):
    """``-sum(r * A)`` with ``r = exp(lp - q)``, q the sampler's logprobs. No config. Source: Tinker's documentation."""

    name: ClassVar[str] = "importance_sampling"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum."""
        ratio = torch.exp(logprobs - inputs["logprobs"])
        return -(ratio * inputs["advantages"]).sum()


@dataclass(frozen=True, kw_only=True)
class StableReinforce(DatumLoss):
    """``importance_sampling``, plus ``kl_coeff * sum(r - 1 - log r)`` when ``kl_coeff`` is set.

    The exact formula of the service this name comes from is not public; this is a documented stand-in, so that recipes
    which use it by default train. The extra term estimates KL(sampler || model) without bias and is never negative. It
    covers the tokens of ``mask`` when the datum brings one, else those with a non-zero advantage, because prompt
    positions carry no sampler logprob. Config: ``kl_coeff`` (default 0, as clients send none).
    """

    name: ClassVar[str] = "stable_reinforce"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    optional_inputs: ClassVar[tuple[str, ...]] = ("mask",)
    kl_coeff: float = 0.0

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum and the penalty."""
        log_ratio = logprobs - inputs["logprobs"]
        ratio = torch.exp(log_ratio)
        loss = -(ratio * inputs["advantages"]).sum()
        if self.kl_coeff == 0.0:
            return loss
        counted = inputs.get("mask", inputs["advantages"]) != 0
        penalty = torch.where(counted, ratio - 1 - log_ratio, torch.zeros_like(ratio)).sum()
        return loss + self.kl_coeff * penalty
