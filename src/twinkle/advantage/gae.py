"""Generalised advantage estimation, token by token, with a critic.

Shapes: N answers, T tokens of the longest (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.advantage.base import EPSILON, Advantage
from twinkle.core.errors import InvalidInput

TokenRows = torch.Tensor | Sequence[Sequence[float]]


class GAEAdvantage(Advantage):
    """``A_t = d_t + gamma lambda A_{t+1}`` with ``d_t = r_t + gamma v_{t+1} - v_t`` (arXiv 1506.02438, eq. 16).

    An answer ends with its last token: the value after it is 0. With ``normalize`` the advantages of all tokens of the
    batch have mean 0 and deviation 1; the returns, which the critic learns, have not.
    """

    def __init__(self, gamma: float = 1.0, gae_lambda: float = 0.95, normalize: bool = True) -> None:
        for name, value in (("gamma", gamma), ("gae_lambda", gae_lambda)):
            if not 0 <= value <= 1:
                raise InvalidInput(name, f"is {value}, must be between 0 and 1")
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalize = normalize

    @staticmethod
    def build_token_rewards(
        rewards: torch.Tensor | Sequence[float],
        lengths: Sequence[int],
        *,
        old_logps: Sequence[Sequence[float]] | None = None,
        ref_logps: Sequence[Sequence[float]] | None = None,
        kl_coef: float = 0.0,
    ) -> list[list[float]]:
        """Each answer's reward at its last token, less ``kl_coef (old - ref)`` at every token.

        Args:
            rewards: One an answer.
            lengths: Tokens of each answer.
            old_logps: Of the policy that sampled, by answer and token; goes with ``ref_logps``.
            ref_logps: Of the reference model.
            kl_coef: The price of a nat of divergence.
        """
        values = torch.as_tensor(rewards, dtype=torch.float64).flatten().tolist()
        if len(values) != len(lengths):
            raise InvalidInput("lengths", f"are {len(lengths)}, rewards {len(values)}; send one of each an answer")
        if (old_logps is None) != (ref_logps is None) or (kl_coef and ref_logps is None):
            raise InvalidInput("ref_logps", "and old_logps go together, and kl_coef with both")
        built = [[0.0] * length for length in lengths]
        for index, (row, value) in enumerate(zip(built, values, strict=True)):
            if not row:
                raise InvalidInput(f"lengths[{index}]", "is 0; an answer has at least one token")
            if old_logps is not None and ref_logps is not None:
                old, ref = list(old_logps[index]), list(ref_logps[index])
                if len(old) != len(row) or len(ref) != len(row):
                    raise InvalidInput(
                        f"old_logps[{index}]", f"has {len(old)} values and ref_logps {len(ref)}, the answer {len(row)}"
                    )
                row[:] = [-kl_coef * (own - other) for own, other in zip(old, ref, strict=True)]
            row[-1] += value
        return built

    def __call__(  # type: ignore[override]
        self,
        rewards: TokenRows,
        values: TokenRows,
        *,
        masks: TokenRows | None = None,
        normalize: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns (N, T) in float32, zero where there is no token.

        Args:
            rewards: By answer and token.
            values: The critic's, by answer and token.
            masks: Which tokens are there; without them each row of ``rewards``, as long as it is.
            normalize: In place of the estimator's own.
            kwargs: What other estimators of the loop take; ignored.
        """
        rewards_NT, mask_NT = _padded(rewards)
        values_NT, values_mask_NT = _padded(values)
        if rewards_NT.shape != values_NT.shape or not torch.equal(mask_NT, values_mask_NT):
            raise InvalidInput("values", "must have a value for each of the rewards")
        if masks is not None:
            given_NT, _ = _padded(masks)
            if given_NT.shape != mask_NT.shape:
                raise InvalidInput("masks", f"have shape {tuple(given_NT.shape)}, rewards {tuple(mask_NT.shape)}")
            mask_NT = mask_NT & given_NT.bool()
        advantages_NT = self._estimate(rewards_NT, values_NT, mask_NT)
        returns_NT = (advantages_NT + values_NT).masked_fill(~mask_NT, 0.0)
        if self.normalize if normalize is None else normalize:
            kept = advantages_NT[mask_NT]
            spread = kept.std(unbiased=False) if len(kept) > 1 else torch.zeros((), dtype=kept.dtype)
            advantages_NT = ((advantages_NT - kept.mean()) / (spread + EPSILON)).masked_fill(~mask_NT, 0.0)
        return advantages_NT.float(), returns_NT.float()

    def _estimate(self, rewards_NT: torch.Tensor, values_NT: torch.Tensor, mask_NT: torch.Tensor) -> torch.Tensor:
        advantages_NT = torch.zeros_like(rewards_NT)
        next_advantage_N = torch.zeros(len(rewards_NT), dtype=rewards_NT.dtype)
        next_value_N = torch.zeros_like(next_advantage_N)
        for position in reversed(range(rewards_NT.shape[1])):
            there_N = mask_NT[:, position]
            surprise_N = rewards_NT[:, position] + self.gamma * next_value_N - values_NT[:, position]
            advantage_N = surprise_N + self.gamma * self.gae_lambda * next_advantage_N
            advantages_NT[:, position] = advantage_N.masked_fill(~there_N, 0.0)
            # What is masked is passed over: the token before it sees the one after it.
            next_advantage_N = torch.where(there_N, advantage_N, next_advantage_N)
            next_value_N = torch.where(there_N, values_NT[:, position], next_value_N)
        return advantages_NT


def _padded(rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as (N, T) in float64, and which of it they fill."""
    if isinstance(rows, torch.Tensor):
        values_NT = (rows if rows.dim() > 1 else rows[None]).detach().to("cpu", torch.float64)
        return values_NT, torch.ones_like(values_NT, dtype=torch.bool)
    tensors = [torch.as_tensor(row, dtype=torch.float64).flatten() for row in rows]
    mask_NT = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in tensors], batch_first=True)
    return pad_sequence(tensors, batch_first=True), mask_NT
