"""Preference losses that need no reference model.

A batch holds pairs: row 2i is the chosen answer w, row 2i + 1 the rejected one l. Legend: pi a row's summed logprob,
|y| its number of trained tokens.

Shapes: B rows, P = B / 2 pairs, T positions (padded).
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Tensors, row_means, target_logps, token_mean
from twinkle.loss.preference import PreferenceLossBase, split_pairs


class SimPOLoss(PreferenceLossBase):
    """``-log sigmoid(beta (pi_w / |w| - pi_l / |l|) - gamma)``, mean over pairs (arXiv 2405.14734, eq. 6)."""

    def __init__(self, beta: float = 2.5, gamma: float = 0.5, ignore_index: int = -100) -> None:
        self.beta = beta
        self.gamma = gamma
        super().__init__(ignore_index)

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss of the batch."""
        chosen_P, rejected_P = self.pair_means(inputs, outputs)
        return LossOutput(loss=-logsigmoid(self.beta * (chosen_P - rejected_P) - self.gamma).mean(), num_tokens=1)


class CPOLoss(PreferenceLossBase):
    """``-log sigmoid(beta (pi_w - pi_l))``, mean over pairs, plus ``bc_coef`` times the chosen tokens' mean ``-lp``.

    Source: arXiv 2401.08417; its likelihood term is per row there, per token here, as common trainers have it.
    """

    def __init__(self, beta: float = 0.1, bc_coef: float = 1.0, ignore_index: int = -100) -> None:
        self.beta = beta
        self.bc_coef = bc_coef
        super().__init__(ignore_index)

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss of the batch."""
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        chosen_P, rejected_P = split_pairs(logps_BT.sum(dim=1))
        preference = -logsigmoid(self.beta * (chosen_P - rejected_P)).mean()
        return LossOutput(loss=preference + self.bc_coef * _chosen_nll(logps_BT, mask_BT), num_tokens=1)


class ORPOLoss(PreferenceLossBase):
    """The chosen tokens' mean ``-lp`` plus ``lambda_orpo`` times ``-log sigmoid(logit(p_w) - logit(p_l))``.

    ``p = exp(pi / |y|)`` is a row's probability a token; mean over pairs (arXiv 2403.07691, eq. 6 and 7).
    """

    def __init__(self, lambda_orpo: float = 0.1, ignore_index: int = -100) -> None:
        self.lambda_orpo = lambda_orpo
        super().__init__(ignore_index)

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss of the batch."""
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        chosen_P, rejected_P = split_pairs(_log_odds(row_means(logps_BT, mask_BT)))
        preference = -logsigmoid(chosen_P - rejected_P).mean()
        return LossOutput(loss=_chosen_nll(logps_BT, mask_BT) + self.lambda_orpo * preference, num_tokens=1)


def _chosen_nll(logps_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return -token_mean(split_pairs(logps_BT)[0], split_pairs(mask_BT)[0])


def _log_odds(logp: torch.Tensor) -> torch.Tensor:
    # A certain row (also one without tokens) would have infinite odds; it gets large ones, and no gradient.
    below = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return below - torch.log(-torch.expm1(below))
