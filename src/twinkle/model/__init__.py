"""How a training step is computed: one frozen base model with many adapters, fused and exact, or one model as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle.core.process.lazy import lazy_attributes

if TYPE_CHECKING:
    from twinkle.model.megatron.model import MegatronModel
    from twinkle.model.megatron.multi_lora import MultiLoraMegatronModel
    from twinkle.model.multi_lora import MultiLoraTransformersModel
    from twinkle.model.transformers_model import TransformersModel
    from twinkle.model.twinkle_model import TwinkleModel
    from twinkle.model.value_model import TransformersValueModel

__all__ = [
    "MegatronModel",
    "MultiLoraMegatronModel",
    "MultiLoraTransformersModel",
    "TransformersModel",
    "TransformersValueModel",
    "TwinkleModel",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "MegatronModel": "twinkle.model.megatron.model",
        "MultiLoraMegatronModel": "twinkle.model.megatron.multi_lora",
        "MultiLoraTransformersModel": "twinkle.model.multi_lora",
        "TransformersModel": "twinkle.model.transformers_model",
        "TransformersValueModel": "twinkle.model.value_model",
        "TwinkleModel": "twinkle.model.twinkle_model",
    },
)
