"""Tensors as they are at one moment, in host memory: who asks goes on while a device copies, and may change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A copy that is there, or on its way; ``tensors`` waits for it and may be called by any thread."""

    copies: Mapping[str, torch.Tensor]
    wait: Callable[[], None] = field(default=lambda: None)

    @property
    def num_bytes(self) -> int:
        """How large it is."""
        return sum(tensor.nbytes for tensor in self.copies.values())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors as they were."""
        self.wait()
        return self.copies

    def __reduce__(self) -> tuple[Callable[[], HostCopy], tuple[()]]:
        """To another process it goes once it is there."""
        return partial(HostCopy, copies=dict(self.tensors())), ()


def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> HostCopy:
    """Begin to copy, without the host waiting for the device.

    From a CUDA device it is done on a stream of its own, into pinned memory. What the current stream does next waits
    for the copies on the device alone: the tensors may be changed, or given up, right after. From a CPU they are copied
    before this returns.
    """
    on_device = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_cuda}
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_cuda}
    if not on_device:
        return HostCopy(copies=copies)
    device = next(iter(on_device.values())).device
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for name, tensor in on_device.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies[name] = host.copy_(tensor, non_blocking=True)
            # Its memory is nobody else's until the copy has been made.
            tensor.record_stream(side)
        copied = torch.cuda.Event()
        copied.record(side)
    current.wait_stream(side)
    return HostCopy(copies={name: copies[name] for name in tensors}, wait=copied.synchronize)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
