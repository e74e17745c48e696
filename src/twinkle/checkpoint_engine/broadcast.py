"""Weights from one rank to all the others, over the world's process group: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from twinkle.checkpoint_engine.base import CheckpointEngine, Topology, Weights

BUCKET_BYTES = 256 << 20
"""About how much goes in one broadcast: the memory that a sync needs beside the weights."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """In bytes."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
        for bucket in self._buckets(weights):
            places = _places(bucket)
            distributed.broadcast_object_list([places], src=self._source)
            flat = torch.empty(places[-1].start + places[-1].num_bytes, dtype=torch.uint8, device=self._device)
            for place, (_, tensor) in zip(places, bucket, strict=True):
                _slot(flat, place).copy_(tensor.detach())
            distributed.broadcast(flat, src=self._source)
        distributed.broadcast_object_list([[]], src=self._source)

    def receive_weights(self) -> Weights:
        """See :class:`CheckpointEngine`. A tensor is good until the next one is asked for."""
        while True:
            told: list[Any] = [None]
            distributed.broadcast_object_list(told, src=self._source)
            places: list[TensorPlace] = told[0]
            if not places:
                return
            flat = torch.empty(places[-1].start + places[-1].num_bytes, dtype=torch.uint8, device=self._device)
            distributed.broadcast(flat, src=self._source)
            for place in places:
                yield place.name, _slot(flat, place)

    def finalize(self) -> None:
        """See :class:`CheckpointEngine`; nothing is kept between syncs."""

    def _buckets(self, weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        for name, tensor in weights:
            if bucket and num_bytes + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append((name, tensor))
            num_bytes += tensor.nbytes
        if bucket:
            yield bucket


def _places(bucket: Sequence[tuple[str, torch.Tensor]]) -> list[TensorPlace]:
    places = []
    start = 0
    for name, tensor in bucket:
        # A view as another dtype must begin at a multiple of its size; 16 is one of all.
        start = -(-start // 16) * 16
        places.append(TensorPlace(name, tuple(tensor.shape), tensor.dtype, start))
        start += tensor.nbytes
    return places


def _slot(flat: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    return flat[place.start : place.start + place.num_bytes].view(place.dtype).view(place.shape)
