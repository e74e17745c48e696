"""Products in eight bits: linear layers by torchao's float8 training, on the GPUs that have such products."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from twinkle.core.errors import InvalidInput

LEAST_CAPABILITY = (8, 9)
"""Of CUDA devices that multiply float8: Ada, Hopper and newer."""
SIZES_IN = 16
"""Sizes of matrices come in multiples of it."""
TORCHAO = "torchao"
FIELD = "mixed_precision"


def check_float8(device: torch.device) -> None:
    """Refuse a device, or an installation, without products in eight bits.

    Raises:
        InvalidInput: Names what is missing.
    """
    if device.type != "cuda":
        raise InvalidInput(
            FIELD, f"is 'fp8', which needs a GPU of NVIDIA's, and this model is on {device.type}; send 'bf16' or 'no'"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
        raise InvalidInput(
            FIELD, f"is 'fp8', which needs compute capability {least}, this GPU has {found}; send 'bf16'"
        )
    if find_spec(TORCHAO) is None:
        raise InvalidInput(FIELD, "is 'fp8', which torchao computes: pip install 'twinkle-queue[fp8]', or send 'bf16'")


def use_float8(model: Any, **settings: Any) -> None:
    """Let a model's linear layers make their three products in float8, scaled tensor by tensor; in place.

    Weights stay as they are, under their names, and are rounded for each product, as inputs and gradients are
    (Micikevicius et al., 2022, "FP8 Formats for Deep Learning"). The layer that makes logits and layers whose sizes are
    no multiples of 16 (adapters' among them), keep their products.

    Args:
        model: Of transformers.
        settings: Of torchao's ``Float8LinearConfig``.
    """
    float8: Any = import_module(f"{TORCHAO}.float8")
    unembedding = model.get_output_embeddings()

    def is_taken(module: torch.nn.Module, name: str) -> bool:
        sizes = module.weight.shape if isinstance(module, torch.nn.Linear) else ()
        return module is not unembedding and len(sizes) == 2 and not any(size % SIZES_IN for size in sizes)

    float8.convert_to_float8_training(model, module_filter_fn=is_taken, config=float8.Float8LinearConfig(**settings))
