"""Features of pictures that are added to their tokens after the first layers (deepstack, arXiv 2406.04334).

transformers finds these tokens by a mask, for whose count of tokens the host waits in each such layer; here their rows
are given.

Shapes: T packed tokens, P tokens of pictures, H hidden size.
"""

from __future__ import annotations

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel


def prepare_deepstack(model: torch.nn.Module) -> None:
    """Let decoders that add features take, for their ``visual_pos_masks``, rows [P]; of others, nothing is changed."""
    for module in model.modules():
        if isinstance(module, (Qwen3VLTextModel, Qwen3VLMoeTextModel)):
            setattr(module, "_deepstack_process", _with_features)  # noqa: B010 - a method, to mypy


def _with_features(hidden_1TH: torch.Tensor, rows_P: torch.Tensor, features_PH: torch.Tensor) -> torch.Tensor:
    # Each row once: nothing is summed in an order of the device's.
    return hidden_1TH.index_add(1, rows_P, features_PH.to(hidden_1TH.dtype)[None])
