"""The mean loss and the norm of the last gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from twinkle.metric.base import Metric, Results


class LossMetric(Metric):
    """``loss``: summed losses by summed counts, so a mean a token or a batch; ``grad_norm`` when there was one."""

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[tuple[float, int]] = []
        self._grad_norm = 0.0

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        *,
        grad_norm: float | torch.Tensor | None = None,
        **kwargs: object,
    ) -> None:
        """Take ``outputs["loss"]`` and ``outputs["num_tokens"]`` (1 where it is missing)."""
        self._parts.append((float(outputs["loss"]), int(outputs.get("num_tokens", 1))))
        if grad_norm is not None:
            self._grad_norm = float(grad_norm)

    def calculate(self) -> Results:
        """``loss`` with four digits and ``grad_norm`` with six, as text; empty when nothing came."""
        parts, grad_norm = self.gather_results(self._parts), self._grad_norm
        self.reset()
        if not parts:
            return {}
        mean = sum(loss for loss, _ in parts) / max(1, sum(count for _, count in parts))
        results: Results = {"loss": f"{mean:.4f}"}
        if grad_norm > 0:
            results["grad_norm"] = f"{grad_norm:.6f}"
        return results
