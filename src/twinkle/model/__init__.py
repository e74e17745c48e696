"""How a training step is computed: one frozen base model with many adapters, fused and exact, or one model as it is."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle.model.base import TwinkleModel
    from twinkle.model.multi_lora import MultiLoraTransformersModel
    from twinkle.model.transformers_model import TransformersModel

__all__ = ["MultiLoraTransformersModel", "TransformersModel", "TwinkleModel"]

_MODULES = {
    "MultiLoraTransformersModel": "twinkle.model.multi_lora",
    "TransformersModel": "twinkle.model.transformers_model",
    "TwinkleModel": "twinkle.model.base",
}


def __getattr__(name: str) -> object:
    """Load the module of a public name when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
