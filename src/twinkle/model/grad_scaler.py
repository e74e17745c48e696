"""Scaling of losses for products in float16, whose small gradients would be zero otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from twinkle.core.errors import InvalidInput

SCALER_FILE = "scaler.json"


def make_scaler(device: torch.device, settings: Mapping[str, Any]) -> torch.amp.GradScaler:
    """Torch's scaler, for gradients on this device."""
    try:
        return torch.amp.GradScaler(device.type, **settings)
    except TypeError as error:
        raise InvalidInput("grad_scaler_config", f"torch's GradScaler does not take it: {error}") from error


def scaler_files(scaler: torch.amp.GradScaler) -> dict[str, bytes]:
    """Where the scale stands."""
    return {SCALER_FILE: (json.dumps(scaler.state_dict(), indent=2) + "\n").encode()}


def load_scaler(scaler: torch.amp.GradScaler, files: Mapping[str, bytes]) -> None:
    """Go on where ``scaler_files`` was taken; a checkpoint without a scale leaves it as it is."""
    if SCALER_FILE in files:
        scaler.load_state_dict(json.loads(files[SCALER_FILE]))
