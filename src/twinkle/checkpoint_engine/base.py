"""How weights get from a training to a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

Weights = Iterable[tuple[str, torch.Tensor]]
Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


class CheckpointEngine(ABC):
    """One way for named tensors from the ranks that train to those that sample.

    A sync is ``prepare``, ``init_process_group``, then ``send_weights`` on one side and ``receive_weights`` on the
    other, and ``finalize``. An engine of one's own brings these methods; sending and receiving may be coroutines.
    """

    is_sender: bool = False
    """Whether this rank is the first of those that train; said before ``prepare``."""

    @abstractmethod
    def prepare(self) -> Mapping[str, Any] | None:
        """Allocate what a sync needs; what the other side must know of it."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """The arguments of ``init_process_group``, by name a list for each rank: those that train, those that sample.

        Args:
            trainer_world_size: Ranks that train.
            rollout_world_size: Ranks that only sample.
            metadata: What ``prepare`` returned on each rank, those that train first.
        """

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Meet the other side."""

    @abstractmethod
    def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Awaitable[None] | None:
        """Send them all. Every rank that trains calls it; which of them sends is the engine's affair."""

    @abstractmethod
    def receive_weights(self) -> Weights | AsyncIterator[tuple[str, torch.Tensor]]:
        """What was sent, in its order."""

    @abstractmethod
    def finalize(self) -> None:
        """Free what the sync has needed."""


class MemoryCheckpointEngine(CheckpointEngine):
    """Both sides in one process: the tensors themselves are handed over, and copied once, by whoever takes them."""

    def __init__(self) -> None:
        self._sent: list[tuple[str, torch.Tensor]] = []

    def prepare(self) -> None:
        """See :class:`CheckpointEngine`."""

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """See :class:`CheckpointEngine`."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """See :class:`CheckpointEngine`."""

    def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :class:`CheckpointEngine`."""
        self._sent = list(weights)

    def receive_weights(self) -> Weights:
        """See :class:`CheckpointEngine`."""
        return self._sent

    def finalize(self) -> None:
        """See :class:`CheckpointEngine`."""
        self._sent = []
