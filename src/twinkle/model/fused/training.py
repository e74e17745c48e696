"""The nouns of a training step: what comes in, what goes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from twinkle.core.loss_graph import LossGraph
from twinkle.loss.datum import LossConfig
from twinkle.model.pictures import Picture
from twinkle.module.lora import LoraAdapter

ENTROPY_WEIGHTS = "entropy_weights"
"""Input of a backward job with entropies: minus the gradient of its loss by each token's entropy."""


@dataclass(frozen=True, eq=False)
class Datum:
    """One sequence: ``tokens`` (N,) int64, and its loss inputs, dense, (N,) or (N, K).

    The caller shifts: position i predicts ``inputs["target_tokens"][i]``.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]
    pictures: tuple[Picture, ...] = ()
    """In the order of their tokens, each of which is the model's token for pictures."""


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One ``forward`` or ``forward_backward`` of one adapter; ``graph`` is what the loss ``custom`` computes.

    ``with_entropies`` is for jobs made of a loss over the batch: forward they give entropies too, backward their datums
    have ``ENTROPY_WEIGHTS``.
    """

    adapter: LoraAdapter
    data: tuple[Datum, ...]
    loss: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    graph: LossGraph | None = None
    with_entropies: bool = False
    is_again: bool = False
    """Whether it was accepted and done before, so that no limit is looked at."""


@dataclass(frozen=True, eq=False)
class TrainOutcome:
    """What a job returns: per datum the target logprobs in the shape of its target tokens, and sums over the job.

    Where the loss compares ``embeddings`` they come instead of logprobs, per datum float32 (H,).
    """

    logprobs: list[np.ndarray]
    loss: float
    num_tokens: int
    metrics: Mapping[str, float]
    embeddings: list[np.ndarray] = field(default_factory=list)
    entropies: list[np.ndarray] = field(default_factory=list)
    """Where they were asked for: per datum (N,), of the distribution that each target token is of, in nats."""


@dataclass(frozen=True, kw_only=True)
class AdamParams:
    """AdamW with decoupled weight decay; ``grad_clip_norm`` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


__all__ = ["AdamParams", "Datum", "LossConfig", "Picture", "TrainJob", "TrainOutcome"]
