"""The names of ``twinkle.model`` where upstream's scripts import them from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.model.multi_lora import MultiLoraTransformersModel
    from twinkle.model.transformers_model import TransformersModel
    from twinkle.model.value_model import TransformersValueModel

__all__ = ["MultiLoraTransformersModel", "TransformersModel", "TransformersValueModel"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "MultiLoraTransformersModel": "twinkle.model.multi_lora",
        "TransformersModel": "twinkle.model.transformers_model",
        "TransformersValueModel": "twinkle.model.value_model",
    },
)
