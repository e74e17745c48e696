"""How often the likeliest token is the label.

Shapes: B rows, T positions (padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.metric.base import Metric, Results


class Accuracy(Metric):
    """``accuracy``, ``correct_tokens`` and ``total_tokens`` over trained positions; needs the model's logits."""

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(device_mesh, process_group)
        self.ignore_index = ignore_index

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[tuple[int, int]] = []

    def accumulate(self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, Any], **kwargs: object) -> None:
        """Compare ``outputs["logits"]`` (B, T, V) with the shifted ``inputs["labels"]`` (B, T)."""
        logits_BTV = outputs.get("logits")
        if logits_BTV is None:
            raise InvalidInput("outputs.logits", "are missing; ask the forward pass for them (return_logits)")
        labels_BT = inputs["labels"]
        mask_BT = labels_BT != self.ignore_index
        correct_BT = (logits_BTV.argmax(dim=-1) == labels_BT) & mask_BT
        self._parts.append((int(correct_BT.sum()), int(mask_BT.sum())))

    def calculate(self) -> Results:
        """The share as text with four digits, and the counts."""
        parts = self.gather_results(self._parts)
        self.reset()
        correct, total = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return {"accuracy": f"{correct / max(1, total):.4f}", "correct_tokens": correct, "total_tokens": total}
