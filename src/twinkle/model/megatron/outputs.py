"""What a loss sees of a micro-batch: from the last stage's logits, split over ranks, to rows.

Shapes: N tokens of this rank (of a packed row), V vocabulary, P this rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import distributed

from twinkle.model.forward_pass import entropies
from twinkle.model.megatron.layout import Layout
from twinkle.processor.input_processor import IGNORED_LABEL


class Scores:
    """Logprobs, entropies and logits of one packed row.

    Args:
        logits_NP: This rank's part, of its own tokens.
        vocab_size: Without what fills the last rank's part up.
        temperature: Divides the logits.
        layout: The ranks.
    """

    def __init__(self, logits_NP: torch.Tensor, vocab_size: int, temperature: float, layout: Layout) -> None:
        logits_NP = logits_NP.to(torch.promote_types(logits_NP.dtype, torch.float32))
        if temperature != 1.0:
            logits_NP = logits_NP / temperature
        self._group = layout.groups.tp
        self._first = self._group.rank() * logits_NP.shape[-1]
        self._vocab_size = vocab_size
        num_filled = self._first + logits_NP.shape[-1] - vocab_size
        if num_filled > 0:
            filling_P = torch.arange(logits_NP.shape[-1], device=logits_NP.device) >= logits_NP.shape[-1] - num_filled
            logits_NP = logits_NP.masked_fill(filling_P, torch.finfo(logits_NP.dtype).min)
        self._logits_NP = logits_NP

    def logps(self, labels: torch.Tensor) -> torch.Tensor:
        """Logprobs of the labels (N,) or, of several a token, (N, K); of token 0 where they are ignored."""
        if labels.dim() == 1:
            return self._logps(labels)
        return torch.stack([self._logps(labels_N) for labels_N in labels.unbind(dim=1)], dim=1)

    def _logps(self, labels_N: torch.Tensor) -> torch.Tensor:
        targets_N = labels_N.masked_fill(labels_N == IGNORED_LABEL, 0)
        if self._group.size() == 1:
            chosen_N = self._logits_NP.gather(-1, targets_N[:, None]).squeeze(-1)
            return chosen_N - torch.logsumexp(self._logits_NP, dim=-1)
        own_N = targets_N - self._first
        is_own_N = (own_N >= 0) & (own_N < self._logits_NP.shape[-1])
        chosen_N = self._logits_NP.gather(-1, own_N.masked_fill(~is_own_N, 0)[:, None]).squeeze(-1)
        return self._sum(chosen_N.masked_fill(~is_own_N, 0.0)) - self._normaliser()

    def _normaliser(self) -> torch.Tensor:
        """The log of the sum of exponents over all parts."""
        largest_N = self._logits_NP.detach().amax(dim=-1)
        distributed.all_reduce(largest_N, distributed.ReduceOp.MAX, group=self._group)
        exponents_N = (self._logits_NP - largest_N[:, None]).exp().sum(dim=-1)
        return largest_N + self._sum(exponents_N).log()

    def _sum(self, values_N: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = reduce_from_tensor_model_parallel_region(values_N, group=self._group)
        return summed

    def logits(self) -> torch.Tensor:
        """Of the whole vocabulary, on every rank (N, V)."""
        gathered: Any = gather_from_tensor_model_parallel_region(self._logits_NP, group=self._group)
        whole: torch.Tensor = gathered[:, : self._vocab_size]
        return whole

    def best(self) -> torch.Tensor:
        """Each token's likeliest next one (N,)."""
        return self.logits().argmax(dim=-1)

    def entropies(self) -> torch.Tensor:
        """Of each token's distribution."""
        return entropies(self.logits())


class OverContext(torch.autograd.Function):
    """All context ranks' tokens one after another; each rank's gradient is that of its own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        """Gather."""
        ctx.group, ctx.length = group, len(own)
        parts = [torch.empty_like(own) for _ in range(group.size())]
        distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The rank's own rows: every rank computes the same loss."""
        start = ctx.group.rank() * ctx.length
        return gradient[start : start + ctx.length], None
