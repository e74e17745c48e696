"""Weighted negative log-likelihood."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle.loss.datum import DatumLoss


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(DatumLoss):
    """``-sum(w * lp)``, over K target columns too when there are several.

    Weights may be negative or zero: a custom loss of the client comes back as this one with ``w = -dC/dlp``.
    Source: the Tinker documentation of losses. No config.
    """

    name: ClassVar[str] = "cross_entropy"
    required_inputs: ClassVar[tuple[str, ...]] = ("weights",)
    top_k_targets: ClassVar[bool] = True

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The weighted sum."""
        return -(inputs["weights"] * logprobs).sum()
