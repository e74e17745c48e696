"""Weights of a few bits, as checkpoints publish them, read into plain ones while they are loaded.

Shapes: O outputs, I inputs, W words of 32 bits, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from twinkle.core.errors import ConfigError

NamedTensors = Iterator[tuple[str, torch.Tensor]]
IN_BLOCKS = "fp8"
"""The ``quant_method`` of weights in 8 bits with a scale for each block."""
IN_GROUPS = "compressed-tensors"
"""Of weights in integers of a few bits with a scale for each group of inputs (Kimi-K2.5)."""
SCALE_SUFFIX = "_scale_inv"
"""Of the name of the scales by which the blocks of a weight in 8 bits are multiplied."""
PACKED, GROUP_SCALE, SHAPE = "_packed", "_scale", "_shape"
"""Of the names of what stands for a weight in groups."""
WORD_BITS = 32


def plain_tensors(tensors: NamedTensors, settings: Mapping[str, Any], dtype: torch.dtype) -> NamedTensors:
    """The tensors of a checkpoint with its quantised weights as plain ones of ``dtype``."""
    if settings["quant_method"] == IN_BLOCKS:
        return _from_blocks(tensors, tuple(settings["weight_block_size"]), dtype)
    (bits,) = {group["weights"]["num_bits"] for group in settings["config_groups"].values()}
    return _from_groups(tensors, bits, dtype)


def _from_blocks(tensors: NamedTensors, block: tuple[int, int], dtype: torch.dtype) -> NamedTensors:
    """Weights in 8 bits multiplied by the scales of their blocks, which may lie in another file.

    transformers' own way takes a weight that is no multiple of a block for one of smaller blocks.
    """
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        weight_name = name.removesuffix(SCALE_SUFFIX)
        if weight_name == name and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
            continue
        other = waiting.pop(weight_name, None)
        if other is None:
            waiting[weight_name] = tensor
            continue
        weight, scales = (other, tensor) if weight_name != name else (tensor, other)
        for axis, width in enumerate(block):
            scales = scales.float().repeat_interleave(width, dim=axis).narrow(axis, 0, weight.shape[axis])
        yield weight_name, (weight.float() * scales).to(dtype)
    if waiting:
        raise ConfigError(f"{min(waiting)} in 8 bits has no scales, or these have no weight")


def _from_groups(tensors: NamedTensors, bits: int, dtype: torch.dtype) -> NamedTensors:
    """Integers unpacked and multiplied by the scales of their groups; a weight's parts may lie in several files."""
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        suffix = next((suffix for suffix in (PACKED, GROUP_SCALE, SHAPE) if name.endswith(f"weight{suffix}")), None)
        if suffix is None:
            yield name, tensor
            continue
        weight_name = name.removesuffix(suffix)
        parts = waiting.setdefault(weight_name, {})
        parts[suffix] = tensor
        if len(parts) == 3:
            del waiting[weight_name]
            yield weight_name, _weight(parts[PACKED], parts[GROUP_SCALE], parts[SHAPE], bits).to(dtype)
    if waiting:
        raise ConfigError(f"{min(waiting)} in {bits} bits lacks its integers, its scales or its shape")


def _weight(words_OW: torch.Tensor, scales_OG: torch.Tensor, shape: torch.Tensor, bits: int) -> torch.Tensor:
    """The plain weight [O, I]: a word holds numbers from its lowest bits on, half of their range added to each."""
    num_outputs, num_inputs = shape.tolist()
    shifts = torch.arange(0, WORD_BITS, bits)
    numbers_OI = ((words_OW[..., None] >> shifts) & (2**bits - 1)).flatten(1)[:, :num_inputs] - 2 ** (bits - 1)
    if scales_OG.dim() != 2 or num_inputs % scales_OG.shape[1] or len(numbers_OI) != num_outputs:
        raise ConfigError(f"scales of {tuple(scales_OG.shape)} do not fit a weight of {num_outputs} x {num_inputs}")
    return numbers_OI.float() * scales_OG.float().repeat_interleave(num_inputs // scales_OG.shape[1], dim=1)
