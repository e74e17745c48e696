"""Running a batch loss on the fused engine, which knows losses of one datum only.

The engine's ``forward`` gives every datum's target logprobs. A batch loss C of these has the same gradient as
``cross_entropy`` with the weights ``-dC/dlp``, the way the wire runs a client's own loss: a ``forward_backward`` with
them adds C's gradient to the adapter, whatever pairs or groups C compares. A loss that counts the entropies H of the
tokens' distributions has a second part, with the weights ``-dC/dH``.

Shapes: N tokens of a datum, K targets a token; B datums, T the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import InvalidInput
from twinkle.loss.base import Loss


@dataclass(frozen=True, eq=False)
class Surrogate:
    """A batch loss seen from its datums: its value, its divisor, and the ``weights`` of each for ``cross_entropy``."""

    loss: float
    num_tokens: int
    weights: tuple[torch.Tensor, ...]
    entropy_weights: tuple[torch.Tensor, ...] = ()


def differentiate(
    loss: Loss,
    logprobs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    *,
    ignore_index: int = -100,
    loss_kwargs: Mapping[str, Any] | None = None,
    entropies: Sequence[torch.Tensor] = (),
) -> Surrogate:
    """Value and weights of ``loss`` on the logprobs of a job's datums.

    Args:
        loss: One that works on ``logps``; with (N, K) logprobs one that works on ``topk_logps`` (``GKDLoss``).
        logprobs: Per datum (N,) or (N, K), as ``TrainOutcome`` returns them.
        labels: Per datum (N,); ``ignore_index`` where nothing is trained (the datum's target is any token there).
        ignore_index: The one ``loss`` was built with.
        loss_kwargs: What the loss is called with beside inputs and outputs.
        entropies: Per datum (N,), for a loss that requires them.
    """
    for index, (scored, target_N) in enumerate(zip(logprobs, labels, strict=True)):
        if scored.shape[:1] != target_N.shape:
            raise InvalidInput(f"labels[{index}]", f"has shape {tuple(target_N.shape)}, logprobs {tuple(scored.shape)}")
    leaves = [scored.detach().clone().requires_grad_(True) for scored in logprobs]
    entropy_leaves = [scored.detach().clone().requires_grad_(True) for scored in entropies]
    key = "logps" if leaves[0].dim() == 1 else "topk_logps"
    with torch.enable_grad():
        outputs = {key: pad_sequence(leaves, batch_first=True)}
        if entropy_leaves:
            outputs["entropies"] = pad_sequence(entropy_leaves, batch_first=True)
        inputs = {"labels": pad_sequence(list(labels), batch_first=True, padding_value=ignore_index)}
        result = loss(inputs, outputs, **(loss_kwargs or {}))
        gradients = torch.autograd.grad(result["loss"], [*leaves, *entropy_leaves])
    weights = tuple(-gradient for gradient in gradients)
    return Surrogate(
        loss=float(result["loss"].detach()),
        num_tokens=result["num_tokens"],
        weights=weights[: len(leaves)],
        entropy_weights=weights[len(leaves) :],
    )
