"""What an engine for many tenants' adapters brings, whichever code computes its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from twinkle.core.pictures import PictureRules
from twinkle.core.slices import Slices
from twinkle.infra.rank_group import RankGroup
from twinkle.model.fused.batch_jobs import Work
from twinkle.model.fused.embedding import FusedEmbedding
from twinkle.model.fused.model_info import ModelInfo
from twinkle.model.fused.training import AdamParams, TrainOutcome
from twinkle.module.adapter import AdapterPool
from twinkle.module.lora import LoraAdapter, LoraConfig


class LoraCore(Protocol):
    """One frozen base model, or this rank's part of it, and adapters that each rank holds whole.

    Not thread-safe: one pass at a time. On several ranks all make the same calls in the same order.
    """

    device: torch.device
    ranks: RankGroup
    info: ModelInfo

    @property
    def pool(self) -> AdapterPool:
        """Makes adapters of its model."""
        ...

    @property
    def base_bytes(self) -> int:
        """What the base model, or this rank's part of it, takes of the device's memory."""
        ...

    @property
    def determinism(self) -> str:
        """What holds of a job's bits; see :class:`twinkle.core.mesh.MeshCapabilities`."""
        ...

    @property
    def picture_rules(self) -> PictureRules | None:
        """How it counts the tokens of pictures; None if it takes text alone."""
        ...

    @property
    def embedding(self) -> FusedEmbedding:
        """What compares embeddings.

        Raises:
            InvalidInput: This engine does not.
        """
        ...

    def create_adapter(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A fresh adapter for one tenant."""
        ...

    def passes(self, jobs: Sequence[Work]) -> Slices[list[TrainOutcome | Exception]]:
        """Run jobs of any adapters, a pass at a time; one result each, in their order."""
        ...

    def forward_backward(self, jobs: Sequence[Work]) -> list[TrainOutcome | Exception]:
        """The same in one go."""
        ...

    def optim_step(self, adapter: LoraAdapter, params: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients of one adapter."""
        ...
