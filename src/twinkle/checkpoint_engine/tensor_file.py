"""Safetensors as bytes, with their metadata, and errors a caller can act on."""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from twinkle.core.errors import InvalidInput

HEADER_SIZE_BYTES = 8


def write_tensors(tensors: Mapping[str, torch.Tensor], *, metadata: tuple[str, str]) -> bytes:
    """Serialize tensors with one metadata entry (with more, equal states would not give equal bytes)."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    return safetensors.numpy.save(arrays, metadata=dict([metadata]))


def read_tensors(name: str, content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file called ``name``, or ``InvalidInput``."""
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise InvalidInput(name, f"is not a safetensors file: {error}") from error


def read_metadata(name: str, content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file called ``name``, or ``InvalidInput``."""
    length = int.from_bytes(content[:HEADER_SIZE_BYTES], "little")
    try:
        header = json.loads(content[HEADER_SIZE_BYTES : HEADER_SIZE_BYTES + length])
    except ValueError as error:
        raise InvalidInput(name, "is not a safetensors file: its header is damaged") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else {}
    return {str(key): str(value) for key, value in metadata.items()}


def copy_checked(name: str, source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    """Copy every tensor of ``source`` into its namesake, or raise ``InvalidInput`` naming the one that does not fit."""
    missing, unknown = sorted(target.keys() - source.keys()), sorted(source.keys() - target.keys())
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"holds the unknown tensor {unknown[0]}"
        raise InvalidInput(name, f"{problem}; it was made for another model or another set of trained layers")
    for key, view in target.items():
        tensor = source[key]
        if tensor.shape != view.shape:
            raise InvalidInput(
                name, f"{key} has shape {tuple(tensor.shape)}, the adapter needs {tuple(view.shape)} on this model"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(name, f"{key} holds values that are not finite floating-point numbers")
    for key, view in target.items():
        view.copy_(source[key])
