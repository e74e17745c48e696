"""Dense models with grouped queries: Qwen2, Qwen2.5, Qwen3."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from twinkle.model.megatron.families.blocks import (
    Family,
    attention_layer,
    attention_rules,
    decoder_rules,
    dense_mlp,
    dense_settings,
    mlp_rules,
    require_whole_attention,
)
from twinkle.model.megatron.weights.rules import WeightRule


def _dense_rules(config: PretrainedConfig) -> list[WeightRule]:
    return [*decoder_rules(config), *attention_rules(config), *mlp_rules()]


def _qwen2_settings(config: PretrainedConfig) -> dict[str, Any]:
    require_whole_attention(config)
    return {**dense_settings(config), "add_qkv_bias": True}


def _qwen3_settings(config: PretrainedConfig) -> dict[str, Any]:
    require_whole_attention(config)
    return {**dense_settings(config), "add_qkv_bias": bool(config.attention_bias), "qk_layernorm": True}


def _qwen2_layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return attention_layer(mlp=dense_mlp(), normalised_heads=False)


def _qwen3_layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return attention_layer(mlp=dense_mlp(), normalised_heads=True)


QWEN2 = Family(settings=_qwen2_settings, layer=_qwen2_layer, weights=_dense_rules)
QWEN3 = Family(settings=_qwen3_settings, layer=_qwen3_layer, weights=_dense_rules)
