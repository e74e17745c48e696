"""What goes into a model, and what a loss makes of what comes out."""

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


class LossOutput(TypedDict):
    """A scalar with its graph, and the count by which the caller divides the gradients it accumulated.

    For a loss that is a mean already, the count is 1 a call.
    """

    loss: torch.Tensor
    num_tokens: int
