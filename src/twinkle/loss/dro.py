"""Direct reward optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from twinkle.loss.datum import DatumLoss


@dataclass(frozen=True, kw_only=True)
class Dro(DatumLoss):
    """``-sum(lp * A - beta / 2 * (lp - q)^2)``.

    Config: ``beta`` 0.05, the value of the Tinker documentation's example; the service's own default is not public, so
    send one.
    """

    name: ClassVar[str] = "dro"
    required_inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    beta: float = 0.05

    def __call__(self, logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The penalised sum."""
        penalty = 0.5 * self.beta * (logprobs - inputs["logprobs"]).square()
        return -(logprobs * inputs["advantages"] - penalty).sum()
