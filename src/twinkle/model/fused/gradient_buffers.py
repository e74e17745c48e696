"""Where the gradient of a job gathers whose adapter has one already, and a full device."""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch

from twinkle.infra.device_memory import DeviceMemory


class GradientBuffers:
    """Makes them, and counts those that there are as held of the device's memory."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._numbers = itertools.count()
        self._alive: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        memory.add("gradients of passes", self)

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(buffer.nbytes for buffer in list(self._alive.values()))

    def zeros_like(self, gradient: torch.Tensor) -> torch.Tensor:
        """One of zeros; what is on the device only to be quick gives way before it."""
        self._memory.make_room(gradient.nbytes)
        buffer = torch.zeros_like(gradient)
        self._alive[next(self._numbers)] = buffer
        return buffer


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device (or the host's allocator, which raises a plain RuntimeError) had no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
