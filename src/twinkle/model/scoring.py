"""Logprobs and entropies from logits that are there already.

Shapes: B rows, T positions (padded), V vocabulary.
"""

from __future__ import annotations

import torch

from twinkle.processor.input_processor import IGNORED_LABEL


def label_logps(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Logprobs of the labels (B, T), of token 0 where they are ignored; float32 at least."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    targets_BT1 = labels_BT.masked_fill(labels_BT == IGNORED_LABEL, 0).unsqueeze(-1)
    # One normaliser a position, where log_softmax would keep another (B, T, V) for the backward pass.
    return logits_BTV.gather(-1, targets_BT1).squeeze(-1) - torch.logsumexp(logits_BTV, dim=-1)


def entropies(logits_BTV: torch.Tensor) -> torch.Tensor:
    """The entropy of each position's distribution (B, T), in nats."""
    logprobs_BTV = torch.log_softmax(logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32)), dim=-1)
    return -(logprobs_BTV.exp() * logprobs_BTV).sum(dim=-1)
