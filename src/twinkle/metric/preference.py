"""How a model ranks pairs of answers against its reference.

A batch holds pairs: row 2i is the chosen answer, row 2i + 1 the rejected one.

Shapes: B rows, P = B / 2 pairs, T positions (padded).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed

from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import target_logps
from twinkle.loss.preference import split_pairs
from twinkle.metric.base import Metric, Results


class DPOMetric(Metric):
    """Means over pairs of the rows' summed logprobs and of the rewards ``beta (pi - ref)`` that DPO gives them.

    ``rewards/accuracies`` is the share of pairs whose chosen answer has the higher reward. Batches without a reference
    count for ``logps/chosen`` and ``logps/rejected`` only.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        beta: float = 0.1,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(device_mesh, process_group)
        self.beta = beta
        self.ignore_index = ignore_index

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[tuple[str, float, int]] = []

    def accumulate(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        *,
        ref_outputs: Mapping[str, torch.Tensor] | None = None,
        ref_logps: Rows | None = None,
        **kwargs: object,
    ) -> None:
        """Take one batch in; the reference comes as for ``DPOLoss``."""
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        chosen_P, rejected_P = split_pairs(logps_BT.detach().sum(dim=1))
        self._add("logps/chosen", chosen_P)
        self._add("logps/rejected", rejected_P)
        if ref_outputs is not None:
            ref_logps = ref_outputs["logps"]
        if ref_logps is None:
            return
        ref_BT = align("ref_logps", ref_logps, mask_BT, like=logps_BT)
        ref_chosen_P, ref_rejected_P = split_pairs(ref_BT.detach().sum(dim=1))
        chosen_reward_P = self.beta * (chosen_P - ref_chosen_P)
        rejected_reward_P = self.beta * (rejected_P - ref_rejected_P)
        self._add("logps/ref_chosen", ref_chosen_P)
        self._add("logps/ref_rejected", ref_rejected_P)
        self._add("rewards/chosen", chosen_reward_P)
        self._add("rewards/rejected", rejected_reward_P)
        self._add("rewards/margins", chosen_reward_P - rejected_reward_P)
        self._add("rewards/accuracies", (chosen_reward_P > rejected_reward_P).float())

    def _add(self, key: str, values_P: torch.Tensor) -> None:
        self._parts.append((key, float(values_P.sum()), len(values_P)))

    def sums(self) -> dict[str, tuple[float, int]]:
        """What was accumulated on this rank: by name the sum, and over how many pairs."""
        found: dict[str, tuple[float, int]] = {}
        for name, value, count in self._parts:
            total, pairs = found.get(name, (0.0, 0))
            found[name] = (total + value, pairs + count)
        return found

    def calculate(self) -> Results:
        """The means, as text with four digits."""
        parts = self.gather_results(self._parts)
        self.reset()
        results: Results = {}
        for name in dict.fromkeys(key for key, _, _ in parts):
            total = sum(value for key, value, _ in parts if key == name)
            results[name] = f"{total / max(1, sum(count for key, _, count in parts if key == name)):.4f}"
        return results
