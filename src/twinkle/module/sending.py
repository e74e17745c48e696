"""Numbers that the host knows, sent to a device that goes on computing meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def send(values: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these numbers on the device; on an accelerator neither side waits for the other.

    From pinned memory alone a copy is not waited for; the allocator keeps it until the copy is done.
    """
    tensor = torch.tensor(np.asarray(values)).to(dtype)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
