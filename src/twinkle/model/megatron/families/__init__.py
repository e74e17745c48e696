"""The families of models that Megatron trains: what their configs say in Megatron's words, their layers, and what their
weights are published as.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transformers import PretrainedConfig

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.families.blocks import Family
from twinkle.model.megatron.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from twinkle.model.megatron.families.dense import QWEN2, QWEN3
from twinkle.model.megatron.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from twinkle.model.megatron.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v3": DEEPSEEK_V3,
        "qwen2": QWEN2,
        "qwen2_moe": QWEN2_MOE,
        "qwen3": QWEN3,
        "qwen3_5_moe_text": QWEN3_5_MOE,
        "qwen3_5_text": QWEN3_5,
        "qwen3_moe": QWEN3_MOE,
    }
)


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model.

    Raises:
        ConfigError: Megatron has none for it here.
    """
    found = FAMILIES.get(str(config.model_type))
    if found is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(
            f"model_id: its type is {config.model_type}, MegatronModel knows {known}; use TransformersModel for it"
        )
    return found
