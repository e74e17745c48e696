"""How well a critic foresees returns.

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from twinkle.loss.alignment import Rows, align
from twinkle.loss.value import predicted_values
from twinkle.metric.base import Metric, Results


class PPOValueMetric(Metric):
    """``train/value_mean``, ``return_mean``, ``value_clip_ratio`` (the share of tokens whose value left the bounds of
    ``PPOValueLoss``) and ``explained_variance`` (1 when the values are the returns, 0 when they know nothing); with
    ``advantages`` their mean and deviation. Batches without ``old_values`` and ``returns`` are passed over.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        epsilon: float = 0.2,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(device_mesh, process_group)
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[dict[str, list[float]]] = []

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        *,
        old_values: Rows | None = None,
        returns: Rows | None = None,
        advantages: Rows | None = None,
        **kwargs: object,
    ) -> None:
        """Take one batch in; the keywords come as for the loss."""
        if outputs.get("values") is None or old_values is None or returns is None:
            return
        values_BT, mask_BT = predicted_values(inputs, outputs, self.ignore_index)
        values_BT = values_BT.detach()
        old_BT = align("old_values", old_values, mask_BT, like=values_BT)
        part = {
            "values": values_BT[mask_BT].tolist(),
            "returns": align("returns", returns, mask_BT, like=values_BT)[mask_BT].tolist(),
            "clipped": ((values_BT - old_BT).abs() > self.epsilon)[mask_BT].double().tolist(),
        }
        if advantages is not None:
            part["advantages"] = align("advantages", advantages, mask_BT, like=values_BT)[mask_BT].tolist()
        self._parts.append(part)

    def calculate(self) -> Results:
        """The numbers over all ranks; empty when nothing came."""
        parts = self.gather_results(self._parts)
        self.reset()
        found = {
            name: torch.tensor([value for part in parts for value in part.get(name, [])], dtype=torch.float64)
            for name in ("values", "returns", "clipped", "advantages")
        }
        if not len(found["values"]):
            return {}
        spread = float(found["returns"].var(unbiased=False))
        left = float((found["returns"] - found["values"]).var(unbiased=False))
        results: Results = {
            "train/value_mean": float(found["values"].mean()),
            "train/return_mean": float(found["returns"].mean()),
            "train/value_clip_ratio": float(found["clipped"].mean()),
            "train/explained_variance": 1 - left / max(spread, 1e-8),
        }
        if len(found["advantages"]):
            results["train/advantage_mean"] = float(found["advantages"].mean())
            results["train/advantage_std"] = float(found["advantages"].std(unbiased=False))
        return results
