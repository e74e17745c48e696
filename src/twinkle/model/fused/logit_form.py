"""What a model does to its logits after the output projection: a factor, a cap, or both.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from twinkle.module.rowwise import RowwiseActivation

FACTORS = ("logit_scale",)
DIVISORS = ("logits_scaling",)
CAP = "final_logit_softcapping"


@dataclass(frozen=True)
class LogitForm:
    """``cap * tanh(factor * logits / cap)`` (Gemma 2, arXiv 2408.00118), or ``factor * logits`` without a cap."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """What a model's text config says; the probe at start finds what it does not."""
        factor = 1.0
        for name in FACTORS:
            factor *= getattr(config, name, None) or 1.0
        for name in DIVISORS:
            factor /= getattr(config, name, None) or 1.0
        return cls(factor, getattr(config, CAP, None))

    @property
    def is_plain(self) -> bool:
        """Whether logits are what the output projection gives."""
        return self.factor == 1.0 and self.cap is None

    def apply_(self, logits_nV: torch.Tensor) -> torch.Tensor:
        """Bring projected logits into form; their memory may be used."""
        if self.factor != 1.0:
            logits_nV.mul_(self.factor)
        if self.cap is None:
            return logits_nV
        return RowwiseActivation(torch.nn.Tanh())(logits_nV.div_(self.cap)).mul_(self.cap)

    def slopes(self, logits_nV: torch.Tensor) -> torch.Tensor | None:
        """By what gradients of these logits are multiplied to become those of the projected ones; None: by one."""
        if self.cap is None:
            return None if self.factor == 1.0 else logits_nV.new_full((1, 1), self.factor)
        squares_nV = (logits_nV / self.cap).square_()
        return squares_nV.neg_().add_(1.0).mul_(self.factor)
