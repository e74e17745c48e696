"""What Llama 4 does by the place of a token in a pass, or with all tokens of one, done token by token instead.

Its experts compute every token, those not chosen with zeros; layers without rotary positions scale queries by how far
into the pass they stand (arXiv 2501.19399), which in a packed pass is not how far into their sequence.

Shapes: T packed tokens, E experts, K experts a token, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextMoe

from twinkle.module.packed_attention import QUERY_SCALE


def prepare_llama4(model: torch.nn.Module) -> None:
    """Change what there is of Llama 4 in a model; of others, nothing."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            setattr(module, "forward", _SparseBlock(module))  # noqa: B010 - a method, to mypy
        elif isinstance(module, Llama4TextAttention) and module.attn_temperature_tuning and not module.use_rope:
            setattr(module, QUERY_SCALE, PositionScale(module.attn_scale, module.floor_scale))
            module.attn_temperature_tuning = False


@dataclass(frozen=True)
class PositionScale:
    """``1 + strength * log(1 + floor((position + 1) / step))``."""

    strength: float
    step: float

    def __call__(self, positions_1T: torch.Tensor) -> torch.Tensor:
        """The factors [1, T] of queries at these positions."""
        steps_1T = torch.floor((positions_1T.double() + 1.0) / self.step)
        # In double precision what a vector's end rounds otherwise is lost when it is rounded to float32.
        return (torch.log1p(steps_1T) * self.strength + 1.0).float()


class _SparseBlock:
    """The forward of a block of experts: those that were not chosen would get, and give, nothing but zeros."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block = self._block
        x_TH = hidden_states.reshape(-1, block.hidden_dim)
        scores_TE, logits_TE = block.router(x_TH)
        experts_TK = logits_TE.topk(block.top_k, dim=1).indices
        y_TH = block.shared_expert(x_TH) + block.experts(x_TH, experts_TK, scores_TE.gather(1, experts_TK))
        return y_TH, logits_TE
