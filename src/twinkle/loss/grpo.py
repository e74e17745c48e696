"""Group relative policy optimisation and its relatives, on a batch of sampled rows.

All share ``r = exp(lp - old)`` and a loss a token; they differ in what the ratio does and in how tokens are averaged.
Legend: lp the model's logprob, old the sampler's, ref the reference model's, A the advantage.

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import Loss, Tensors, require, row_means, target_logps, token_mean, zero_loss

AggregationMode = Literal["token-mean", "seq-mean-token-mean"]

MAX_LOG_RATIO = 20.0
"""Bound of every log ratio before ``exp``: a runaway token gives a large number with no gradient, not infinity."""


class GRPOLoss(Loss):
    """``-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta KL - entropy_coef H`` a token.

    Mean over a row's tokens, then over rows; a row without trained tokens counts as 0. KL is the estimate
    ``exp(ref - lp) - (ref - lp) - 1``. Source: DeepSeekMath (arXiv 2402.03300), eq. 3 and 4; ``epsilon_high``
    (default ``epsilon``): DAPO (arXiv 2503.14476). H is the entropy of the position's distribution.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.beta = beta
        self.entropy_coef = entropy_coef
        self.ignore_index = ignore_index

    @property
    def require_entropy(self) -> bool:
        """Whether ``outputs["entropies"]`` is needed."""
        return self.entropy_coef != 0.0

    def __call__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        *,
        advantages: Rows | None = None,
        old_logps: Rows | None = None,
        ref_logps: Rows | None = None,
        num_items_in_batch: int | None = None,
        **kwargs: object,
    ) -> LossOutput:
        """The loss of the batch.

        Args:
            inputs: ``labels`` (B, T), shifted.
            outputs: ``logps`` (B, T), and ``entropies`` (B, T) when ``entropy_coef`` is not 0.
            advantages: In any form ``align`` takes. Without it the loss is 0: the pass only wants logprobs.
            old_logps: Of the policy that sampled; without it the ratio is 1 and only its gradient counts.
            ref_logps: Of the reference model; needed when ``beta`` is not 0.
            num_items_in_batch: The divisor of losses averaged over tokens, where the batch is a part of one.
            kwargs: What other losses of the loop take; ignored.
        """
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        if advantages is None:
            return zero_loss(logps_BT)
        advantages_BT = align("advantages", advantages, mask_BT, like=logps_BT)
        old_BT = logps_BT if old_logps is None else align("old_logps", old_logps, mask_BT, like=logps_BT)
        ratio_BT = _ratio(self._log_ratio(logps_BT - old_BT.detach(), mask_BT))
        loss_BT = self._policy_loss(ratio_BT, advantages_BT, logps_BT)
        if self.beta != 0.0:
            loss_BT = loss_BT + self.beta * self._divergence(logps_BT, ref_logps, mask_BT)
        if self.entropy_coef != 0.0:
            entropies_BT = torch.atleast_2d(require(outputs, "entropies", where="outputs"))
            loss_BT = loss_BT - self.entropy_coef * entropies_BT.masked_fill(~mask_BT, 0.0)
        return LossOutput(loss=self._average(loss_BT, mask_BT, num_items_in_batch), num_tokens=1)

    def _log_ratio(self, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        return log_ratio_BT

    def _policy_loss(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, logps_BT: torch.Tensor) -> torch.Tensor:
        clipped_BT = ratio_BT.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)

    def _divergence(self, logps_BT: torch.Tensor, ref_logps: Rows | None, mask_BT: torch.Tensor) -> torch.Tensor:
        if ref_logps is None:
            raise InvalidInput("ref_logps", f"are missing, beta is {self.beta}; send them or set beta to 0")
        log_ratio_BT = align("ref_logps", ref_logps, mask_BT, like=logps_BT).detach() - logps_BT
        return _ratio(log_ratio_BT) - log_ratio_BT - 1

    def _average(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor, num_items: int | None) -> torch.Tensor:
        return row_means(loss_BT, mask_BT).mean()


class PPOLoss(GRPOLoss):
    """GRPO's token loss for advantages a token (arXiv 1707.06347, eq. 7), which ``GAEAdvantage`` estimates.

    ``loss_agg_mode`` says what is averaged: all tokens of the batch, or each row's first and then the rows.
    """

    def __init__(
        self,
        loss_agg_mode: AggregationMode = "token-mean",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, ignore_index)
        if loss_agg_mode not in get_args(AggregationMode):
            modes = ", ".join(get_args(AggregationMode))
            raise InvalidInput("loss_agg_mode", f"is {loss_agg_mode!r}, must be one of {modes}")
        self.loss_agg_mode = loss_agg_mode

    def _average(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor, num_items: int | None) -> torch.Tensor:
        if self.loss_agg_mode == "seq-mean-token-mean":
            return super()._average(loss_BT, mask_BT, num_items)
        return _over_tokens(loss_BT, mask_BT, num_items)


class GSPOLoss(GRPOLoss):
    """GRPO with one ratio a row, ``exp(mean(lp - old))`` over its trained tokens (arXiv 2507.18071, eq. 5 and 7)."""

    def _log_ratio(self, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        return row_means(log_ratio_BT, mask_BT)[:, None].expand_as(log_ratio_BT)


class SAPOLoss(GRPOLoss):
    """``-A sigmoid(tau (r - 1)) 4 / tau`` a token: a soft gate in place of the clip (arXiv 2511.20347).

    tau is ``tau_pos`` where A is positive, else ``tau_neg``. ``epsilon`` is there for the signature, unused.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(epsilon, beta=beta, ignore_index=ignore_index)
        if min(tau_pos, tau_neg) <= 0:
            raise InvalidInput("tau_pos, tau_neg", f"are {tau_pos} and {tau_neg}, must be positive")
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def _policy_loss(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, logps_BT: torch.Tensor) -> torch.Tensor:
        positive_BT = torch.full_like(ratio_BT, self.tau_pos)
        tau_BT = torch.where(advantages_BT > 0, positive_BT, torch.full_like(ratio_BT, self.tau_neg))
        return -advantages_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT


class _TokenAveraged(GRPOLoss):
    """Averages over all tokens of the batch, so that long rows weigh more than short ones."""

    def _average(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor, num_items: int | None) -> torch.Tensor:
        return _over_tokens(loss_BT, mask_BT, num_items)


class CISPOLoss(_TokenAveraged):
    """``-stop_gradient(min(r, 1 + epsilon_high)) A lp`` a token, sum over tokens by their number (arXiv 2506.13585).

    Clipped tokens keep a gradient. The divisor is ``num_items_in_batch`` when it comes. ``epsilon_high`` is ``epsilon``
    unless set; there is no lower bound.
    """

    def _policy_loss(self, ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, logps_BT: torch.Tensor) -> torch.Tensor:
        return -ratio_BT.detach().clamp(max=1 + self.epsilon_high) * advantages_BT * logps_BT


class BNPOLoss(_TokenAveraged):
    """GRPO's token loss, sum over all tokens of the batch by their number (DAPO's averaging, arXiv 2503.14476)."""


class DRGRPOLoss(GRPOLoss):
    """GRPO's token loss, sum over tokens by ``B * max_completion_length`` (Dr. GRPO, arXiv 2503.20783).

    A constant divisor takes away the bias towards long wrong answers.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        max_completion_length: int = 1024,
        epsilon_high: float | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, ignore_index=ignore_index)
        if max_completion_length < 1:
            raise InvalidInput("max_completion_length", f"is {max_completion_length}, must be at least 1")
        self.max_completion_length = max_completion_length

    def _average(self, loss_BT: torch.Tensor, mask_BT: torch.Tensor, num_items: int | None) -> torch.Tensor:
        total = loss_BT.masked_fill(~mask_BT, 0.0).sum()
        return total / (len(loss_BT) * self.max_completion_length)


def _over_tokens(loss_BT: torch.Tensor, mask_BT: torch.Tensor, num_items: int | None) -> torch.Tensor:
    if num_items is None:
        return token_mean(loss_BT, mask_BT)
    return loss_BT.masked_fill(~mask_BT, 0.0).sum() / max(1, num_items)


def _ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
