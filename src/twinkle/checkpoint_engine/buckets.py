"""Named tensors in stretches of bytes: what is sent at a time, and where in it each tensor lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from twinkle.checkpoint_engine.base import Weights

BUCKET_BYTES = 256 << 20
"""About how much goes at a time: the memory that a sync needs beside the weights."""
ALIGNMENT = 16
"""A view as another dtype must begin at a multiple of its size; this is one of all."""

Bucket = list[tuple[str, torch.Tensor]]


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

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its bucket."""
        return flat[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


def buckets_of(weights: Weights, bucket_bytes: int) -> Iterator[Bucket]:
    """The weights in their order, so many at a time as fit; a tensor that is larger goes alone."""
    bucket: Bucket = []
    num_bytes = 0
    for name, tensor in weights:
        if bucket and num_bytes + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def places_of(bucket: Bucket) -> list[TensorPlace]:
    """Where the tensors of a bucket lie."""
    places = []
    start = 0
    for name, tensor in bucket:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        places.append(TensorPlace(name, tuple(tensor.shape), tensor.dtype, start))
        start += tensor.nbytes
    return places


def num_bytes_of(places: Sequence[TensorPlace]) -> int:
    """Of a bucket with tensors at these places."""
    return places[-1].start + places[-1].num_bytes


def empty_bucket(places: Sequence[TensorPlace], device: torch.device) -> torch.Tensor:
    """Room for a bucket, in bytes."""
    return torch.empty(num_bytes_of(places), dtype=torch.uint8, device=device)


def packed(bucket: Bucket, places: Sequence[TensorPlace], device: torch.device) -> torch.Tensor:
    """The bytes of a bucket."""
    flat = empty_bucket(places, device)
    for place, (_, tensor) in zip(places, bucket, strict=True):
        place.of(flat).copy_(tensor.detach())
    return flat
