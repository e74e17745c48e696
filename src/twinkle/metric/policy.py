"""How far a policy has moved from the one that sampled.

Legend: d the model's logprob less the sampler's, r = exp(d).

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed

from twinkle.core.errors import InvalidInput
from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import row_means, target_logps
from twinkle.metric.base import Metric, Results, padded

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class MovedToken:
    """A token on which policy and sampler differ much: the row and place it stands in, and by how much."""

    rank: int
    gsi: int
    """The number of its row among those that its rank has seen since the last report."""
    pos: int
    token_id: int
    kl: float
    ratio: float
    logp_new: float
    logp_old: float


@dataclass(frozen=True)
class PolicyTotals:
    """Sums over one batch, its largest values, and the tokens that have them."""

    sums: Mapping[str, float]
    token_kl_max: float = 0.0
    token_ratio_max: float = 0.0
    moved: tuple[MovedToken, ...] = ()


class GRPOMetric(Metric):
    """Means over trained tokens, as numbers under ``train/``.

    - ``policy_confidence`` (the exponential of) ``mean_new_logp``, and ``entropy`` where the loss wants entropies.
    - With ``old_logps``: ``mean_old_logp``, ``logp_diff_mean`` (d), ``approx_kl`` (``r - 1 - d``, an estimate of the
      sampler's distance from the model), and the largest ``token_kl_max`` and ``token_ratio_max``.
    - With ``advantages`` too: ``clip_ratio_low`` and ``_high``, the shares of tokens whose gradient the clip takes away
      (r below ``1 - epsilon`` where the advantage is negative, above ``1 + epsilon_high`` where it is positive), and
      ``clip_ratio``, both.
    - With ``top_k_kl`` too: ``_high_kl_records``, the so many tokens of all ranks with the largest ``kl``, largest
      first, as :class:`MovedToken` has them; for a script to look at, not recorded.

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
        if top_k_kl < 0:
            raise InvalidInput("top_k_kl", f"is {top_k_kl}; send 0 (off) or how many tokens to list")
        self.top_k_kl = top_k_kl
        super().__init__(device_mesh, process_group)
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high

    def reset(self) -> None:
        """Forget what was accumulated."""
        self._parts: list[PolicyTotals] = []
        self._num_rows = 0

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
        first_row, self._num_rows = self._num_rows, self._num_rows + len(mask_BT)
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
        moved = self._moved(kl_BT, inputs["labels"].view(mask_BT.shape), logps_BT, old_BT, first_row)
        ratio_max = float(ratio_BT[mask_BT].max())
        self._parts.append(PolicyTotals(sums, float(kl_BT.max()), ratio_max, moved))

    def _moved(
        self,
        kl_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        logps_BT: torch.Tensor,
        old_BT: torch.Tensor,
        first_row: int,
    ) -> tuple[MovedToken, ...]:
        number = min(self.top_k_kl, int((kl_BT > 0).sum()))
        rank = 0 if self.process_group is None else distributed.get_rank(self.process_group)
        moved = []
        for place in kl_BT.flatten().topk(number).indices.tolist():
            at = divmod(place, kl_BT.shape[1])
            new, old = float(logps_BT[at]), float(old_BT[at])
            ratio = math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, new - old)))
            moved.append(
                MovedToken(rank, first_row + at[0], at[1], int(labels_BT[at]), float(kl_BT[at]), ratio, new, old)
            )
        return tuple(moved)

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
            if self.top_k_kl:
                moved = sorted((token for part in parts for token in part.moved), key=lambda token: -token.kl)
                results["_high_kl_records"] = [asdict(token) for token in moved[: self.top_k_kl]]
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
