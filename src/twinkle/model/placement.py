"""Where a model's weights go, and in which dtype."""

from __future__ import annotations

from typing import Literal

import torch

from twinkle.core.errors import InvalidInput
from twinkle.infra import DeviceMesh, Platform
from twinkle.infra.platform import local_rank

MixedPrecision = Literal["bf16", "no"]


def device_of(mesh: DeviceMesh | None) -> torch.device:
    """The device of this rank: of the mesh's kind if it names one, else what the machine has."""
    platform = Platform.current() if mesh is None or mesh.device_type is None else Platform.named(mesh.device_type)
    return torch.device(platform.device_of(local_rank()))


def computes_in_bf16(mixed_precision: str | None, device: torch.device) -> bool:
    """Whether products are made in bfloat16: as asked, by default on accelerators.

    Raises:
        InvalidInput: Another precision was asked for.
    """
    if mixed_precision not in (None, "bf16", "no"):
        raise InvalidInput("mixed_precision", f"is {mixed_precision!r}; send 'bf16' or 'no'")
    return mixed_precision == "bf16" or (mixed_precision is None and device.type != "cpu")


def weights_dtype(mixed_precision: str | None, device: torch.device) -> torch.dtype:
    """The dtype of weights that are not trained."""
    return torch.bfloat16 if computes_in_bf16(mixed_precision, device) else torch.float32
