"""What goes into a model, what comes out, and what a loss makes of it.

Shapes: B rows, T positions (padded), V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import torch

TokenValues = list[int] | np.ndarray | torch.Tensor


class InputFeature(TypedDict, total=False):
    """One encoded row. ``labels`` are shifted: ``labels[i]`` is the token to come after ``input_ids[i]``."""

    input_ids: TokenValues
    attention_mask: TokenValues
    position_ids: TokenValues
    labels: TokenValues
    completion_mask: TokenValues
    length: int
    routed_experts: Any


class ModelOutput(TypedDict, total=False):
    """What a pass over a batch of rows gave.

    ``logps`` (B, T) are the logprobs of ``labels``; where these are ignored, the logprob of token 0 stands.
    ``loss`` is a float once it has been calculated. ``num_tokens`` is the divisor of its gradient.
    """

    logits: torch.Tensor | None
    loss: float
    logps: torch.Tensor
    topk_logps: torch.Tensor
    entropies: torch.Tensor
    num_tokens: int
    embeddings: torch.Tensor
    routed_experts: Any


class LossOutput(TypedDict):
    """A scalar with its graph, and the count by which the caller divides the gradients it accumulated.

    For a loss that is a mean already, the count is 1 a call.
    """

    loss: torch.Tensor
    num_tokens: int
