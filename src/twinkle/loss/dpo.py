"""Direct preference optimisation against a reference model.

A batch holds pairs: row 2i is the chosen answer, row 2i + 1 the rejected one. Legend: pi and ref a row's summed logprob
under the model and the reference, w the chosen row, l the rejected one.

Shapes: B rows, P = B / 2 pairs, T positions (padded).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch.nn.functional import logsigmoid, relu

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.alignment import Rows, align
from twinkle.loss.base import Tensors, require, target_logps, token_mean, zero_loss
from twinkle.loss.preference import PreferenceLossBase, split_pairs

PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "kto_pair"]


class DPOLoss(PreferenceLossBase):
    """With ``m = (pi_w - ref_w) - (pi_l - ref_l)``, by ``loss_type``, mean over pairs.

    - ``sigmoid``: ``-(1 - s) log sigmoid(beta m) - s log sigmoid(-beta m)``, s ``label_smoothing``
      (arXiv 2305.18290, eq. 7; with smoothing it is known as conservative DPO).
    - ``hinge``: ``max(0, 1 - beta m)`` (SLiC, arXiv 2305.10425).
    - ``ipo``: ``(beta m - 1 / (2 beta))^2``, the squared loss of arXiv 2310.12036, eq. 17, on the scaled margin.
    - ``kto_pair``: ``(1 - sigmoid(beta (m_w - z_l)) + 1 - sigmoid(beta (z_w - m_l))) / 2`` with ``m_x = pi_x - ref_x``
      and ``z_x = max(0, mean over the batch of m_x)``, a constant for the gradient (arXiv 2402.01306).

    ``sft_weight`` adds that many times the mean negative logprob of the chosen rows' tokens.
    """

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        loss_type: PreferenceLoss = "sigmoid",
        reference_free: bool = False,
        sft_weight: float = 0.0,
    ) -> None:
        if loss_type not in get_args(PreferenceLoss):
            raise InvalidInput("loss_type", f"is {loss_type!r}, must be one of {', '.join(get_args(PreferenceLoss))}")
        if loss_type == "ipo" and beta == 0.0:
            raise InvalidInput("beta", "is 0; ipo aims at the margin 1 / (2 beta) and needs a positive one")
        self.beta = beta
        self.label_smoothing = label_smoothing
        super().__init__(ignore_index)
        self.loss_type = loss_type
        self.reference_free = reference_free
        self.sft_weight = sft_weight

    def __call__(
        self,
        inputs: Tensors,
        outputs: Tensors,
        *,
        ref_outputs: Tensors | None = None,
        ref_logps: Rows | None = None,
        ref_chosen_logps: torch.Tensor | None = None,
        ref_rejected_logps: torch.Tensor | None = None,
        **kwargs: object,
    ) -> LossOutput:
        """The loss of the batch.

        Args:
            inputs: ``labels`` (B, T), shifted.
            outputs: ``logps`` (B, T).
            ref_outputs: The reference's outputs on the same inputs, with ``logps``.
            ref_logps: Its logprobs a token, in any form ``align`` takes.
            ref_chosen_logps: Its sums over the chosen rows (P,); goes with ``ref_rejected_logps``.
            ref_rejected_logps: Its sums over the rejected rows (P,).
            kwargs: What other losses of the loop take; ignored.

        Without any reference the loss is 0 (the pass only wants logprobs), unless ``reference_free``.
        """
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        if ref_outputs is not None:
            ref_logps = require(ref_outputs, "logps", where="ref_outputs")
        chosen_P, rejected_P = split_pairs(logps_BT.sum(dim=1))
        if self.reference_free:
            ref_chosen_P, ref_rejected_P = torch.zeros_like(chosen_P), torch.zeros_like(rejected_P)
        elif ref_logps is not None:
            ref_BT = align("ref_logps", ref_logps, mask_BT, like=logps_BT)
            ref_chosen_P, ref_rejected_P = split_pairs(ref_BT.detach().sum(dim=1))
        elif ref_chosen_logps is not None and ref_rejected_logps is not None:
            ref_chosen_P = ref_chosen_logps.detach().to(chosen_P).reshape(chosen_P.shape)
            ref_rejected_P = ref_rejected_logps.detach().to(rejected_P).reshape(rejected_P.shape)
        else:
            return zero_loss(logps_BT)
        loss = self._preference(chosen_P - ref_chosen_P, rejected_P - ref_rejected_P).mean()
        if self.sft_weight != 0.0:
            loss = loss - self.sft_weight * token_mean(split_pairs(logps_BT)[0], split_pairs(mask_BT)[0])
        return LossOutput(loss=loss, num_tokens=1)

    def _preference(self, chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
        margin_P = self.beta * (chosen_P - rejected_P)
        match self.loss_type:
            case "hinge":
                return relu(1 - margin_P)
            case "ipo":
                return (margin_P - 1 / (2 * self.beta)).square()
            case "kto_pair":
                chosen_base = chosen_P.detach().mean().clamp(min=0)
                rejected_base = rejected_P.detach().mean().clamp(min=0)
                kept_P = torch.sigmoid(self.beta * (chosen_P - rejected_base))
                shunned_P = torch.sigmoid(self.beta * (chosen_base - rejected_P))
                return 1 - (kept_P + shunned_P) / 2
            case "sigmoid":
                return -(1 - self.label_smoothing) * logsigmoid(margin_P) - self.label_smoothing * logsigmoid(-margin_P)
