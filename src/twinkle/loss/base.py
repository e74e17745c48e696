"""What a loss over a whole batch is: the rows' target logprobs in, one scalar and the divisor of its gradient out.

The losses a client names on the wire are sums over one datum's tokens (``datum``); these are the training library's,
which may average over rows, compare pairs of rows or weigh groups of them. ``labels`` are shifted already: the logprob
at position t is the one of ``labels[t]``.

Shapes: B rows, T positions (padded), V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from twinkle.core.errors import InvalidInput
from twinkle.data_format.batch import LossOutput

Tensors = Mapping[str, torch.Tensor]


class Loss(ABC):
    """A callable on a batch: ``inputs`` hold ``labels``, ``outputs`` what the model computed.

    ``outputs`` may hold ``logps`` (B, T), ``logits`` (B, T, V), ``entropies`` (B, T), ``values`` (B, T),
    ``embeddings``; the flags say
    which of them the loss wants. Keywords are shared by all losses of a loop: each ignores those it does not know.
    """

    require_logits: ClassVar[bool] = False
    require_logps: ClassVar[bool] = True
    require_values: ClassVar[bool] = False
    works_without_logits: ClassVar[bool] = False
    """Whether a loss that requires logits takes something smaller where the model keeps none."""

    @property
    def is_linear(self) -> bool:
        """Whether the gradient by the logprobs does not depend on them: the engine then needs one pass, not two."""
        return False

    @property
    def require_entropy(self) -> bool:
        """Whether ``outputs["entropies"]`` is needed."""
        return False

    @abstractmethod
    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: Any) -> LossOutput:
        """The loss of the batch."""


def require(tensors: Tensors, name: str, *, where: str) -> torch.Tensor:
    """The named tensor, or ``InvalidInput`` that says where it belongs."""
    value = tensors.get(name)
    if value is None:
        raise InvalidInput(f"{where}.{name}", "is missing; this loss needs it")
    return value


def target_logps(inputs: Tensors, outputs: Tensors, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the labels (B, T), at least float32 and zero where ignored, and the mask of the trained positions.

    Where the outputs have no ``logps`` they are computed from ``logits``. Ignored positions are overwritten, not
    multiplied by zero: whatever stands there, NaN included, reaches neither the value nor the gradient.
    """
    labels_BT = torch.atleast_2d(require(inputs, "labels", where="inputs"))
    mask_BT = labels_BT != ignore_index
    logps_BT = outputs.get("logps")
    if logps_BT is None:
        logps_BT = _gather(require(outputs, "logits", where="outputs"), labels_BT, mask_BT)
    logps_BT = torch.atleast_2d(logps_BT)
    if logps_BT.shape != labels_BT.shape:
        raise InvalidInput("outputs.logps", f"has shape {tuple(logps_BT.shape)}, labels {tuple(labels_BT.shape)}")
    dtype = torch.promote_types(logps_BT.dtype, torch.float32)
    return logps_BT.to(dtype).masked_fill(~mask_BT, 0.0), mask_BT


def _gather(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(logits_BTV.dtype, torch.float32)
    logprobs_BTV = torch.log_softmax(logits_BTV.to(dtype), dim=-1)
    targets_BT1 = labels_BT.masked_fill(~mask_BT, 0).unsqueeze(-1)
    return logprobs_BTV.gather(-1, targets_BT1).squeeze(-1)


def token_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over all trained tokens of the batch; 0 when there is none."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum() / mask_BT.sum().clamp(min=1)


def row_means(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Per row the mean over its trained tokens (B,); 0 for a row without any."""
    return values_BT.masked_fill(~mask_BT, 0.0).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)


def zero_loss(values: torch.Tensor) -> LossOutput:
    """Zero with a graph, for a pass that only wants logprobs: ``backward`` works and leaves zero gradients."""
    return LossOutput(loss=values.flatten()[:0].sum(), num_tokens=1)


class PlainLoss(Loss):
    """Calls ``function(inputs, outputs, **kwargs)``, which gives a scalar tensor or a ``LossOutput``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, inputs: Tensors, outputs: Tensors, **kwargs: Any) -> LossOutput:
        """The function's value; a bare scalar counts as a mean."""
        result = self.function(inputs, outputs, **kwargs)
        return LossOutput(loss=result, num_tokens=1) if isinstance(result, torch.Tensor) else result
