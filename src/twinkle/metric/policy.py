"""How far a policy has moved from the one that sampled.

Legend: d the model's logprob less the sampler's, r = exp(d).

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import row_means, target_logps
from twinkle.metric.base import Metric, Results, padded

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyTotals:
    """Sums over one batch, and its largest values."""

    sums: Mapping[str, float]
    token_kl_max: float = 0.0
    token_ratio_max: float = 0.0


class GRPOMetric(Metric):
    """Means over trained tokens, as numbers under ``train/``.

    - ``policy_confidence`` (the exponential of) ``mean_new_logp``, and ``entropy`` where the loss wants entropies.
    - With ``old_logps``: ``mean_old_logp``, ``logp_diff_mean`` (d), ``approx_kl`` (``r - 1 - d``, an estimate of the
      sampler's distance from the model), and the largest ``token_kl_max`` and ``token_ratio_max``.
    - With ``advantages`` too: ``clip_ratio_low`` and ``_high``, the shares of tokens whose gradient the clip takes away
      (r below ``1 - epsilon`` where the advantage is negative, above ``1 + epsilon_high`` where it is positive), and
      ``clip_ratio``, both.

    Logprobs are taken as they come, so ``temperature`` is that of the pass; it is an argument for upstream's sake.
    """

    def __init__(
        self,
        device_mesh: object | None = None,
        process_group: distributed.ProcessGroup | None = None,
        ignore_index: int = -100,
        temperature: float = 1.0,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        top_k_kl: int = 0,
    ) -> None:
        if top_k_kl:
            raise InvalidInput("top_k_kl", "lists single tokens, which is not supported; leave it at 0")
        super().__init__(device_mesh, process_group)
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[PolicyTotals] = []

    def accumulate(
        self,
        inputs: Any,
        outputs: Mapping[str, Any],
        *,
        old_logps: Rows | None = None,
        advantages: Rows | None = None,
        **kwargs: object,
    ) -> None:
        """Take one batch in, of tensors or of rows; ``old_logps`` and ``advantages`` come as for the loss."""
        inputs, outputs = padded(inputs, outputs, ignore_index=self.ignore_index)
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        logps_BT = logps_BT.detach()
        if not mask_BT.any():
            return
        sums = {"tokens": float(mask_BT.sum()), "new": float(logps_BT.sum())}
        if outputs.get("entropies") is not None:
            sums["entropy"] = float(outputs["entropies"].detach().view(mask_BT.shape)[mask_BT].sum())
        if old_logps is None:
            self._parts.append(PolicyTotals(sums))
            return
        old_BT = align("old_logps", old_logps, mask_BT, like=logps_BT)
        difference_BT = (logps_BT - old_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_BT = difference_BT.exp()
        kl_BT = (ratio_BT - 1 - difference_BT).masked_fill(~mask_BT, 0.0)
        sums |= {
            "tokens with old": sums["tokens"],
            "old": float(old_BT.sum()),
            "difference": float(difference_BT.masked_fill(~mask_BT, 0.0).sum()),
            "kl": float(kl_BT.sum()),
        }
        if advantages is not None:
            advantages_BT = align("advantages", advantages, mask_BT, like=logps_BT)
            sums |= self._clipped(difference_BT, advantages_BT, mask_BT)
        ratio_max = float(ratio_BT[mask_BT].max())
        self._parts.append(PolicyTotals(sums, token_kl_max=float(kl_BT.max()), token_ratio_max=ratio_max))

    def _clipped(
        self, difference_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> dict[str, float]:
        ratio_BT = difference_BT.exp()
        low_BT = (ratio_BT < 1 - self.epsilon) & (advantages_BT < 0) & mask_BT
        high_BT = (ratio_BT > 1 + self.epsilon_high) & (advantages_BT > 0) & mask_BT
        return {"low": float(low_BT.sum()), "high": float(high_BT.sum()), "clippable": float(mask_BT.sum())}

    def calculate(self) -> Results:
        """The numbers over all ranks; empty when no trained token came."""
        parts = self.gather_results(self._parts)
        self.reset()
        sums: Counter[str] = Counter()
        for part in parts:
            sums.update(part.sums)
        if not sums["tokens"]:
            return {}
        mean_new = sums["new"] / sums["tokens"]
        results: Results = {"train/policy_confidence": math.exp(mean_new), "train/mean_new_logp": mean_new}
        if count := sums["tokens with old"]:
            for name, key in (("mean_old_logp", "old"), ("logp_diff_mean", "difference"), ("approx_kl", "kl")):
                results[f"train/{name}"] = sums[key] / count
            results["train/token_kl_max"] = max(part.token_kl_max for part in parts)
            results["train/token_ratio_max"] = max(part.token_ratio_max for part in parts)
        if "entropy" in sums:
            results["train/entropy"] = sums["entropy"] / sums["tokens"]
        if count := sums["clippable"]:
            results["train/clip_ratio_low"] = sums["low"] / count
            results["train/clip_ratio_high"] = sums["high"] / count
            results["train/clip_ratio"] = (sums["low"] + sums["high"]) / count
        return results


class PPOMetric(GRPOMetric):
    """The same for ``PPOLoss``, whose tokens have advantages of their own."""


class GSPOMetric(GRPOMetric):
    """The same for ``GSPOLoss``: rows are clipped, by the exponential of their mean d."""

    def _clipped(
        self, difference_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> dict[str, float]:
        ratio_B = row_means(difference_BT, mask_BT).exp()
        advantage_B = row_means(advantages_BT, mask_BT)
        there_B = mask_BT.any(dim=1)
        low_B = (ratio_B < 1 - self.epsilon) & (advantage_B < 0) & there_B
        high_B = (ratio_B > 1 + self.epsilon_high) & (advantage_B > 0) & there_B
        return {"low": float(low_B.sum()), "high": float(high_B.sum()), "clippable": float(there_B.sum())}


class CISPOMetric(GRPOMetric):
    """The same for ``CISPOLoss``, which bounds r from above only, whatever the advantage's sign."""

    def _clipped(
        self, difference_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> dict[str, float]:
        high_BT = (difference_BT.exp() > 1 + self.epsilon_high) & mask_BT
        return {"low": 0.0, "high": float(high_BT.sum()), "clippable": float(mask_BT.sum())}
