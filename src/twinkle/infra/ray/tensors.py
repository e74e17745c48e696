"""Tensors on their way between processes: from whatever device by the host's memory, copied once on each side."""

from __future__ import annotations

import ray
import torch

Packed = tuple[object, torch.dtype, tuple[int, ...]]


def send_tensors_by_memory() -> None:
    """Let this process, which Ray has been started in, send and take plain tensors as their bytes.

    Of one on an accelerator a copy on the host arrives: who takes it may have no such device.
    """
    ray.util.register_serializer(torch.Tensor, serializer=_packed, deserializer=_unpacked)


def _packed(tensor: torch.Tensor) -> Packed:
    plain = tensor.detach().cpu().contiguous()
    # NumPy has no bfloat16: bytes travel, and Ray keeps them out of the pickle.
    return plain.view(-1).view(torch.uint8).numpy() if plain.numel() else None, plain.dtype, tuple(plain.shape)


def _unpacked(packed: Packed) -> torch.Tensor:
    values, dtype, shape = packed
    if values is None:
        return torch.empty(shape, dtype=dtype)
    # Ray's memory is not to be written to; whoever gets a tensor may.
    return torch.tensor(values).view(dtype).reshape(shape)
