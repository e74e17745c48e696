"""Frozen Linears whose weights are kept in eight bits: half of bfloat16's memory, a quarter of float32's.

torchao rounds each row of a weight to integers with a scale of its own. A pass unpacks the weight of one layer at a
time and multiplies by that, forward and backward, so rows feel each other as little as with plain weights, and adapters
are as ever. Embeddings, the layer of logits and everything that no adapter trains stay plain.

Shapes: O outputs, I inputs.
"""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from twinkle.core.errors import ConfigError
from twinkle.module.expert_forms import ExpertForm
from twinkle.module.targets import kind_of

TORCHAO = "torchao"
FIELD = "TWINKLE_QUANTISATION"
MULTIPLE = 8
"""Weights whose inputs are no multiple of it stay plain, since torchao's integers may."""


class PackedLinear(torch.nn.Linear):
    """A Linear whose weight torchao has packed."""

    def __init__(self, packed: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self.weight, self.bias = packed.weight, packed.bias

    def plain_weight(self) -> torch.Tensor:
        """What the integers stand for [O, I], in memory of its own."""
        return self.weight.dequantize()


class EightBits:
    """Packs the Linears of a decoder that adapters can train."""

    def __init__(self) -> None:
        self.largest_error = 0.0
        """By how much any weight has changed, in parts of its norm."""
        self.num_packed = 0

    @staticmethod
    def check() -> None:
        """Raise ``ConfigError`` where torchao is missing."""
        if find_spec(TORCHAO) is None:
            raise ConfigError(
                f"{FIELD}: int8 weights are torchao's: pip install 'twinkle-queue[quantised]', or leave it at none"
            )

    @torch.no_grad()
    def pack(self, decoder: torch.nn.Module, *, name: str) -> None:
        """Replace them, one by one.

        Raises:
            ConfigError: Most of the model's weights are in fused experts, which stay plain.
        """
        self.check()
        quantization: Any = _quiet_import(f"{TORCHAO}.quantization")
        config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
        for path, module in list(decoder.named_modules()):
            if ExpertForm.of(path, module) is not None:
                raise ConfigError(f"{FIELD}: {name} has fused experts, which are not packed; leave it at none")
            if not isinstance(module, torch.nn.Linear) or kind_of(path) is None or module.in_features % MULTIPLE:
                continue
            before_OI = module.weight.detach()
            quantization.quantize_(torch.nn.ModuleList([module]), config)
            packed = PackedLinear(module)
            packed.weight.requires_grad_(False)
            error = (packed.plain_weight().float() - before_OI.float()).norm() / before_OI.float().norm()
            self.largest_error = max(self.largest_error, float(error))
            self.num_packed += 1
            parent, _, leaf = path.rpartition(".")
            setattr(decoder.get_submodule(parent), leaf, packed)


def _quiet_import(name: str) -> Any:
    """It says at ERROR which of its kernels, none of which is used here, do not load on this machine."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        return import_module(name)
    finally:
        logger.setLevel(level)
