"""From logits to a token: temperature, top-k, top-p, inverse CDF.

Every row is computed by row-wise operations alone, so its bits do not depend on the other rows.

Shape suffixes: N rows, V vocabulary, R some of the rows, K candidates kept for output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from twinkle.infra.sending import send


@dataclass(frozen=True)
class ChoiceRule:
    """How one row's token is chosen."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    barred: tuple[int, ...] = ()
    """Tokens that are never drawn: of a vision model those that stand for pictures, which no text may hold. They keep
    their logprobs, as tokens beyond top-k and top-p do."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token wins."""
        return self.temperature == 0

    @property
    def scale(self) -> float:
        """What logits are divided by; greedy rows keep temperature 1 for their logprobs."""
        return 1.0 if self.is_greedy else self.temperature

    @property
    def is_restricted(self) -> bool:
        """Whether only part of the vocabulary may be drawn."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)


def scaled_logprobs(logits_NV: torch.Tensor, rules: Sequence[ChoiceRule]) -> torch.Tensor:
    """Returns float32 logprobs [N, V] of the temperature-scaled distributions; a row with bad logits holds NaN."""
    logits_NV = logits_NV.float()
    scaled = [row for row, rule in enumerate(rules) if rule.scale != 1]
    if scaled:
        # In float64, so that a tiny temperature on large logits stays finite; the other rows keep their bits.
        scale_R = send([rules[row].scale for row in scaled], torch.float64, logits_NV.device)
        rows_R = send(scaled, torch.int64, logits_NV.device)
        scaled_RV = logits_NV.index_select(0, rows_R).double()
        scaled_RV = ((scaled_RV - scaled_RV.amax(-1, keepdim=True)) / scale_R[:, None]).float()
        logits_NV = logits_NV.index_copy(0, rows_R, scaled_RV)
    return torch.log_softmax(logits_NV, dim=-1)


def are_finite(logprobs_NV: torch.Tensor) -> torch.Tensor:
    """Which rows come from finite logits [N]: NaN spreads over its whole row, and ``amax`` keeps it."""
    return torch.isfinite(logprobs_NV.amax(-1))


def choose(logprobs_NV: torch.Tensor, rules: Sequence[ChoiceRule], uniforms: Sequence[float]) -> torch.Tensor:
    """Returns one token id per row [N]: the likeliest for greedy rows, else by inverse CDF at the row's uniform.

    A row that is not finite gets some token of the vocabulary. The host waits for nothing.
    """
    device = logprobs_NV.device
    uniform_N = send(uniforms, torch.float64, device)
    logprobs_NV = _without_barred(logprobs_NV, rules)
    free = [row for row, rule in enumerate(rules) if not rule.is_greedy and not rule.is_restricted]
    if len(free) == len(rules):
        return _invert_cdf(logprobs_NV.double().exp_(), uniform_N)
    tokens_N = logprobs_NV.argmax(-1)
    if free:
        rows_R = send(free, torch.int64, device)
        probs_RV = logprobs_NV.index_select(0, rows_R).double().exp_()
        tokens_N.index_copy_(0, rows_R, _invert_cdf(probs_RV, uniform_N.index_select(0, rows_R)))
    restricted = [row for row, rule in enumerate(rules) if rule.is_restricted]
    if restricted:
        rows_R = send(restricted, torch.int64, device)
        chosen_R = _choose_restricted(
            logprobs_NV.index_select(0, rows_R),
            [rules[row] for row in restricted],
            uniform_N.index_select(0, rows_R),
        )
        tokens_N.index_copy_(0, rows_R, chosen_R)
    return tokens_N


def _without_barred(logprobs_NV: torch.Tensor, rules: Sequence[ChoiceRule]) -> torch.Tensor:
    cells = [(row, token) for row, rule in enumerate(rules) for token in rule.barred]
    if not cells:
        return logprobs_NV
    row_C, token_C = send(np.array(cells), torch.int64, logprobs_NV.device).unbind(-1)
    return logprobs_NV.index_put((row_C, token_C), torch.full_like(logprobs_NV[0, 0], -torch.inf))


def top_logprobs(logprobs_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids and logprobs [N, K] of the k likeliest tokens per row, likeliest first."""
    top = logprobs_NV.topk(k, dim=-1)
    return top.indices, top.values


def _choose_restricted(logprobs_RV: torch.Tensor, rules: Sequence[ChoiceRule], uniform_R: torch.Tensor) -> torch.Tensor:
    """Top-k first, then top-p on what is left, renormalised: the order in which vLLM and transformers apply them."""
    ordered = logprobs_RV.sort(dim=-1, descending=True, stable=True)
    probs_RV = ordered.values.double().exp()
    vocab_size = probs_RV.shape[-1]
    device = probs_RV.device
    top_k_R = send([rule.top_k if rule.top_k > 0 else vocab_size for rule in rules], torch.int64, device)
    top_p_R = send([rule.top_p for rule in rules], torch.float64, device)
    probs_RV = probs_RV.masked_fill(torch.arange(vocab_size, device=device) >= top_k_R[:, None], 0.0)
    cdf_RV = probs_RV.cumsum(-1)
    mass_before_RV = cdf_RV - probs_RV
    beyond_RV = mass_before_RV >= (top_p_R * cdf_RV[:, -1])[:, None]
    beyond_RV &= top_p_R[:, None] < 1  # rounding must not cut the tail of a row without top-p
    rank_R = _invert_cdf(probs_RV.masked_fill(beyond_RV, 0.0), uniform_R)
    return ordered.indices.gather(-1, rank_R[:, None])[:, 0]


def _invert_cdf(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    cdf_NV = probs_NV.cumsum(-1)
    total_N1 = cdf_NV[:, -1:].contiguous()
    index_N1 = torch.searchsorted(cdf_NV, uniform_N[:, None] * total_N1, right=True)
    # uniform * total may round up to total: the last token that has any probability takes it.
    last_N1 = torch.searchsorted(cdf_NV, total_N1)
    # No token lies beyond the vocabulary, as one would where the row holds NaN.
    return torch.minimum(index_N1, last_N1)[:, 0].clamp_(max=probs_NV.shape[-1] - 1)
