"""Weights from one rank to all the others, over the world's process group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from twinkle.checkpoint_engine.base import CheckpointEngine, Topology, Weights
from twinkle.checkpoint_engine.buckets import BUCKET_BYTES, TensorPlace, buckets_of, empty_bucket, packed, places_of


class BroadcastCheckpointEngine(CheckpointEngine):
    """The first rank that trains sends buckets of tensors; every rank of the world takes part in each.

    Ranks that train too, but do not send, only keep step.
    """

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, device: torch.device | str = "cpu") -> None:
        self._bucket_bytes = bucket_bytes
        self._device = torch.device(device)
        self._source = 0

    def prepare(self) -> Mapping[str, Any]:
        """See :class:`CheckpointEngine`."""
        return {"rank": distributed.get_rank()}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[Mapping[str, Any] | None]
    ) -> Topology:
        """See :class:`CheckpointEngine`: all are told who sends."""
        first = metadata[0]
        assert first is not None
        return {"source": [first["rank"]] * trainer_world_size}, {"source": [first["rank"]] * rollout_world_size}

    def init_process_group(self, *, source: int = 0, **kwargs: Any) -> None:
        """See :class:`CheckpointEngine`; the group is the world's."""
        self._source = source

    def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """See :class:`CheckpointEngine`."""
        if distributed.get_rank() != self._source:
            # Whoever has a part of sharded weights must be there while they are put together.
            for _ in weights:
                pass
            for _ in self.receive_weights():
                pass
            return
        for bucket in buckets_of(weights, self._bucket_bytes):
            places = places_of(bucket)
            distributed.broadcast_object_list([places], src=self._source)
            distributed.broadcast(packed(bucket, places, self._device), src=self._source)
        distributed.broadcast_object_list([[]], src=self._source)

    def receive_weights(self) -> Weights:
        """See :class:`CheckpointEngine`. A tensor is good until the next one is asked for."""
        while True:
            told: list[Any] = [None]
            distributed.broadcast_object_list(told, src=self._source)
            places: list[TensorPlace] = told[0]
            if not places:
                return
            flat = empty_bucket(places, self._device)
            distributed.broadcast(flat, src=self._source)
            for place in places:
                yield place.name, place.of(flat)

    def finalize(self) -> None:
        """See :class:`CheckpointEngine`; nothing is kept between syncs."""
