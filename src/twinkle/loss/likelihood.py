"""Likelihood and regression losses of a batch.

Shapes: B rows, T positions (padded), V vocabulary, n trained positions of the batch.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput
from twinkle.loss.base import Loss, Tensors, require, target_logps

Reduction = Literal["mean", "sum"]


def _reduce_tokens(total: torch.Tensor, num_tokens: int, reduction: Reduction) -> LossOutput:
    """A sum over tokens as the reduction asks: divided now, or by the caller at the end of the accumulation window."""
    if reduction == "mean":
        return LossOutput(loss=total / max(1, num_tokens), num_tokens=1)
    return LossOutput(loss=total, num_tokens=num_tokens)


def _token_nll(logps: torch.Tensor, *, dft: bool) -> torch.Tensor:
    """``-lp``, or with ``dft`` ``-stop_gradient(p) * lp``: dynamic fine-tuning (arXiv 2508.05629)."""
    return -logps.detach().exp() * logps if dft else -logps


class CrossEntropyLoss(Loss):
    """``-sum(lp)`` over the trained tokens, divided by their number with ``reduction="mean"``."""

    def __init__(self, ignore_index: int = -100, reduction: Reduction = "mean", dft: bool = False) -> None:
        _check_reduction(reduction)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.dft = dft

    @property
    def is_linear(self) -> bool:
        """Whether the gradient by the logprobs does not depend on them."""
        return not self.dft

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss; 0 when nothing is trained."""
        logps_BT, mask_BT = target_logps(inputs, outputs, self.ignore_index)
        total = _token_nll(logps_BT, dft=self.dft).masked_fill(~mask_BT, 0.0).sum()
        return _reduce_tokens(total, int(mask_BT.sum()), self.reduction)


class ChunkedCrossEntropyLoss(Loss):
    """``CrossEntropyLoss`` from logits, ``chunk_size`` tokens at a time.

    The softmax of a chunk is computed again in the backward pass, so that it is never kept for more than one chunk.
    A model that keeps no logits at all gives ``logps`` instead.
    """

    require_logits: ClassVar[bool] = True
    require_logps: ClassVar[bool] = False
    works_without_logits: ClassVar[bool] = True

    def __init__(
        self, chunk_size: int, ignore_index: int = -100, reduction: Reduction = "mean", dft: bool = False
    ) -> None:
        if chunk_size < 1:
            raise InvalidInput("chunk_size", f"is {chunk_size}, must be at least 1")
        _check_reduction(reduction)
        self.chunk_size = chunk_size
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.dft = dft

    @property
    def is_linear(self) -> bool:
        """Whether the gradient by the logprobs does not depend on them."""
        return not self.dft

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss; 0 when nothing is trained."""
        logits_BTV = outputs.get("logits")
        if logits_BTV is None:
            return CrossEntropyLoss(self.ignore_index, self.reduction, self.dft)(inputs, outputs)
        labels_BT = require(inputs, "labels", where="inputs")
        mask_BT = labels_BT != self.ignore_index
        logits_nV, labels_n = logits_BTV[mask_BT], labels_BT[mask_BT]
        total = logits_nV[:0].sum()
        for chunk_nV, targets_n in zip(logits_nV.split(self.chunk_size), labels_n.split(self.chunk_size), strict=True):
            total = total + checkpoint(self._chunk_total, chunk_nV, targets_n, use_reentrant=False)
        return _reduce_tokens(total, len(labels_n), self.reduction)

    def _chunk_total(self, logits_nV: torch.Tensor, labels_n: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(logits_nV.dtype, torch.float32)
        logps_n = torch.log_softmax(logits_nV.to(dtype), dim=-1).gather(1, labels_n[:, None])[:, 0]
        return _token_nll(logps_n, dft=self.dft).sum()


class LigerFusedLinearCrossEntropyLoss(Loss):
    """Cross entropy with label smoothing and soft-capped logits, under the name scripts know it by.

    The fusion with the output projection is the engine's affair (``model.loss_head`` never keeps logits); this class
    takes ``logits`` where the outputs have them, else plain ``logps``, which can have neither smoothing nor a cap.
    ``softcap`` c maps logits to ``c * tanh(logits / c)``.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: Reduction = "sum",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        _check_reduction(reduction)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.softcap = softcap

    @property
    def is_linear(self) -> bool:
        """Whether the gradient by the logprobs does not depend on them."""
        return True

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The loss; 0 when nothing is trained."""
        logits_BTV = outputs.get("logits")
        if logits_BTV is None:
            if self.label_smoothing or self.softcap is not None:
                raise InvalidInput("outputs.logits", "are missing; label_smoothing and softcap cannot do without them")
            return CrossEntropyLoss(self.ignore_index, self.reduction)(inputs, outputs)
        labels_BT = require(inputs, "labels", where="inputs")
        mask_BT = labels_BT != self.ignore_index
        logits_nV = logits_BTV[mask_BT]
        if self.softcap is not None:
            logits_nV = self.softcap * torch.tanh(logits_nV / self.softcap)
        total = functional.cross_entropy(
            logits_nV, labels_BT[mask_BT], reduction="sum", label_smoothing=self.label_smoothing
        )
        return _reduce_tokens(total, len(logits_nV), self.reduction)


class MSELoss(Loss):
    """Mean squared difference of ``outputs["logits"]`` and ``inputs["labels"]``, for models with one output a label."""

    require_logits: ClassVar[bool] = True
    require_logps: ClassVar[bool] = False

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: object) -> LossOutput:
        """The mean."""
        predicted = require(outputs, "logits", where="outputs")
        labels = require(inputs, "labels", where="inputs")
        if predicted.numel() != labels.numel():
            raise InvalidInput("outputs.logits", f"hold {predicted.numel()} values for {labels.numel()} labels")
        return LossOutput(loss=functional.mse_loss(predicted.flatten(), labels.flatten().to(predicted)), num_tokens=1)


def _check_reduction(reduction: str) -> None:
    """Raise ``InvalidInput`` for a reduction that does not exist."""
    if reduction not in ("mean", "sum"):
        raise InvalidInput("reduction", f"is {reduction!r}, must be 'mean' or 'sum'")
