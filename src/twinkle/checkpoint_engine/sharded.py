"""Tensors that may be spread over ranks, whole and back."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; of a sharded one all ranks must ask together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a whole tensor, which every rank has, into one that may be sharded."""
    target.copy_(like(source, target))


def like(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which every rank has, on the device and with the sharding of ``target``."""
    source = source.to(target.device)
    if not isinstance(target, DTensor):
        return source
    return distribute_tensor(source, target.device_mesh, target.placements, src_data_rank=None)
