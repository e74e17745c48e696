"""What the device at hand can do, found out by doing it once, and said once where it cannot."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from twinkle.core.process.events import event_log

_log = event_log()


@cache
def plain_dtype(device_type: str) -> torch.dtype:
    """The dtype of frozen weights where nothing else is asked for: float32 on a CPU, else bfloat16 if it is there."""
    if device_type == "cpu":
        return torch.float32
    if _multiplies(device_type, torch.bfloat16):
        return torch.bfloat16
    _log.warning("device.no_bfloat16", device=device_type, next="weights are float32, twice as large")
    return torch.float32


def _multiplies(device_type: str, dtype: torch.dtype) -> bool:
    try:
        module = torch.get_device_module(device_type)
        if hasattr(module, "is_bf16_supported") and not module.is_bf16_supported():
            return False
        square = torch.ones(8, 8, dtype=dtype, device=device_type)
        return bool((functional.linear(square, square) == 8).all())
    except (RuntimeError, TypeError):  # as a device says that it has no such kernel
        return False
