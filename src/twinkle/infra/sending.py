"""Numbers on their way between the host and a device that goes on computing meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNED_BYTES = 16
"""Where kernels expect arrays to begin."""


def send(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers on the device, with memory of its own; neither side waits for the other.

    From pinned memory alone a copy is not waited for; the allocator keeps it until the copy is done.
    """
    tensor = torch.as_tensor(np.array(values)).to(dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


class Parcel:
    """Many small arrays of one dtype that go to a device in one copy: a copy each would cost more than what they hold.

    What ``put`` gives has its values from ``send`` on. On a CPU each array has memory of its own.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._num_values = 0
        is_here = device.type == "cpu"
        self._here = torch.empty(0 if is_here else capacity, dtype=dtype, pin_memory=device.type == "cuda")
        self._there = self._here if is_here else torch.empty(capacity, dtype=dtype, device=device)

    def put(self, values: np.ndarray) -> torch.Tensor:
        """Where these will be on the device."""
        if self._device.type == "cpu":
            return send(values, self._dtype, self._device)
        place = slice(self._num_values, self._num_values + values.size)
        self._here[place].numpy()[:] = values.reshape(-1)
        self._num_values = place.stop
        return self._there[place].view(values.shape)

    def send(self) -> None:
        """Send what was put in; neither side waits for the other."""
        if self._num_values:
            self._there[: self._num_values].copy_(self._here[: self._num_values], non_blocking=True)


class FixedParcel:
    """Arrays that go to the same places on a device again and again, in one copy: for work that is recorded once.

    Args:
        kinds: The shape and the dtype of each.
        device: Where they go.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self._device = device
        self._spans: list[slice] = []
        end = 0
        for shape, dtype in kinds:
            start = end + -end % ALIGNED_BYTES
            end = start + math.prod(shape) * dtype.itemsize
            self._spans.append(slice(start, end))
        self._there = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = [
            self._there[span].view(dtype).view(shape) for span, (shape, dtype) in zip(self._spans, kinds, strict=True)
        ]
        """Where they are on the device."""

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Send them all, of their shapes and dtypes; neither side waits for the other."""
        here = torch.zeros(len(self._there), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for span, tensor, array in zip(self._spans, self.tensors, arrays, strict=True):
            told = torch.from_numpy(np.array(array, order="C"))
            if told.shape != tensor.shape or told.dtype != tensor.dtype:
                raise ValueError(f"{told.dtype} {tuple(told.shape)} for {tensor.dtype} {tuple(tensor.shape)}")
            here[span].view(told.dtype).view(told.shape).copy_(told)
        self._there.copy_(here, non_blocking=True)


class Arriving:
    """Values on their way to the host from now on; reading them waits for no work that the device gets later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> np.ndarray:
        """The values, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.cpu().numpy()


def fetch(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The values of tensors, in their shapes and dtypes; a device is waited for once, or once for each dtype."""
    found: list[np.ndarray] = [np.empty(0)] * len(tensors)
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        places = [index for index, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind]
        whole = torch.cat([tensors[index].detach().reshape(-1) for index in places]).cpu().numpy()
        start = 0
        for index in places:
            end = start + tensors[index].numel()
            found[index] = whole[start:end].reshape(tensors[index].shape)
            start = end
    return found
