"""Weights in blocks of eight bits, as llama.cpp has them (Q8_0): 32 numbers of a row, and one scale in float16."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

KIND = gguf.GGMLQuantizationType.Q8_0
FILE_KIND = gguf.LlamaFileType.MOSTLY_Q8_0
BLOCK_NUMBERS, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[KIND]
_ROUTER = ".mlp.gate.weight"
"""Of layers of experts: llama.cpp computes with it in float32."""


def takes_blocks(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is put into blocks: matrices whose rows are made of whole ones, but for routers.

    Args:
        name: Of a parameter in transformers' terms.
        shape: Its.
    """
    return len(shape) > 1 and shape[-1] % BLOCK_NUMBERS == 0 and not name.endswith(_ROUTER)


def in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight (..., n / 32 * 34)."""
    return torch.from_numpy(quantize(rows.float().numpy(), KIND))


def out_of_blocks(rows: torch.Tensor) -> torch.Tensor:
    """What a weight is after it was in blocks, float32."""
    read: np.ndarray = dequantize(quantize(rows.float().numpy(), KIND), KIND)
    return torch.from_numpy(read).reshape(rows.shape)
