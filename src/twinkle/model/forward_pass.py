"""The last forward pass of an adapter, until the next one, and what is read off its logits.

Shapes: B rows, T positions (padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from twinkle.data_format.answers import ModelOutput
from twinkle.loss import Loss
from twinkle.model.pictures import Picture
from twinkle.processor.input_processor import IGNORED_LABEL

CAUSAL = "causal_lm"
EMBEDDING = "embedding"


@dataclass(frozen=True)
class PassOptions:
    """How a forward pass is made.

    ``temperature`` divides the logits before the logprobs are taken. ``micro_batch_size`` is how many rows go through
    the model at once; all of them without it. ``router_replay_action`` is a ``RouterReplayAction`` or its name.
    """

    temperature: float = 1.0
    return_logits: bool = False
    task: str = "causal_lm"
    micro_batch_size: int | None = None
    router_replay_action: object = None


class Parts(Protocol):
    """The parts of a pass whose outputs have no graph to the weights."""

    def backward(self, last: ForwardPass, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the gradient of the pass's loss, scaled."""
        ...


@dataclass(eq=False)
class ForwardPass:
    """What went in, what came out (with its graph, in training), and what it cost once that is calculated."""

    inputs: Mapping[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    is_training: bool
    tokens: Sequence[torch.Tensor] = ()
    """Where the outputs have no graph to the weights: each row's tokens, to run them again."""
    targets: Sequence[torch.Tensor] = ()
    """With ``tokens``: each row's tokens whose logprobs came out, (N,) or (N, K)."""
    pictures: Sequence[tuple[Picture, ...]] = ()
    """With ``tokens``: the pictures among them, row by row."""
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    return_logits: bool = False
    loss: torch.Tensor | None = None
    num_tokens: int = 1
    parts: Parts | None = None
    """Of a pass that went through the model in parts: what runs them again for their gradient."""
    gradients: dict[str, torch.Tensor] | None = None
    """Of the loss by each output, once :meth:`settle_loss` has found them."""

    def calculate_loss(self, loss: Loss) -> None:
        """Calculate the loss of the outputs, with the keywords that belong to the pass."""
        self.gradients = None
        with torch.set_grad_enabled(self.is_training):
            result: Any = loss(self.inputs, self.outputs, **self.loss_kwargs)
        # A script's own loss may give a bare mean, or say by a count of 0 that it is one.
        is_bare = isinstance(result, torch.Tensor)
        self.loss = result if is_bare else result["loss"]
        self.num_tokens = 1 if is_bare else int(result.get("num_tokens") or 1)

    def settle_loss(self) -> None:
        """Find the gradient by the outputs, where these are leaves: from here on the pass is data, and has no graph."""
        if self.loss is None or not self.loss.requires_grad:
            return
        leaves = {name: values for name, values in self.outputs.items() if values.requires_grad}
        found = torch.autograd.grad(self.loss, list(leaves.values()), allow_unused=True)
        self.gradients = {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
        }
        self.loss = self.loss.detach()

    def release_graph(self) -> None:
        """Let go of what the backward pass needed; the values stay for the metrics."""
        self.outputs = {name: value.detach() for name, value in self.outputs.items()}
        self.loss = None if self.loss is None else self.loss.detach()

    def output(self) -> ModelOutput:
        """What the caller sees: no graph, the loss as a number."""
        result = ModelOutput(logits=None)
        for name, value in self.outputs.items():
            if name == "logits" and not self.return_logits:
                continue
            result[name] = value.detach()
        if self.loss is not None:
            result["loss"] = float(self.loss.detach())
            result["num_tokens"] = self.num_tokens
        return result


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
