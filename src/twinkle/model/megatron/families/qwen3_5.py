"""Qwen3.5, and its mixture of experts: gated delta nets with a layer of gated attention among every few.

Of a model that takes pictures the language part alone is trained.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from twinkle.model.megatron.families.blocks import (
    LAYER,
    PUBLISHED_LAYER,
    Family,
    attention_layer,
    attention_rules,
    decoder_layer,
    decoder_rules,
    dense_mlp,
    dense_settings,
    head_size,
    mlp_rules,
)
from twinkle.model.megatron.families.qwen_moe import (
    EXPERTS,
    expert_rules,
    expert_settings,
    gated_expert_rules,
    gated_expert_settings,
)
from twinkle.model.megatron.modules.delta_net import DeltaNetSubmodules, GatedDeltaNet
from twinkle.model.megatron.modules.experts import ExpertLayer
from twinkle.model.megatron.weights.rules import Columns, GatedHeads, PartedRows, Rows, Same, WeightRule

LINEAR = "linear_attention"


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "ffn_hidden_size": config.hidden_size,
        **dense_settings(config),
        "qk_layernorm": True,
        "attention_output_gate": True,
        "add_qkv_bias": bool(config.attention_bias),
        "layernorm_zero_centered_gamma": True,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
        "linear_key_head_dim": config.linear_key_head_dim,
        "linear_value_head_dim": config.linear_value_head_dim,
        "linear_num_key_heads": config.linear_num_key_heads,
        "linear_num_value_heads": config.linear_num_value_heads,
    }


def _moe_settings(config: PretrainedConfig) -> dict[str, Any]:
    experts = expert_settings(config, num_experts=config.num_experts)
    return {**_settings(config), **experts, **gated_expert_settings(config)}


def _layer_with(mlp: Any, config: PretrainedConfig, index: int) -> ModuleSpec:
    if config.layer_types[index] != LINEAR:
        return attention_layer(mlp=mlp, normalised_heads=True)
    projections = DeltaNetSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    return decoder_layer(ModuleSpec(module=GatedDeltaNet, submodules=projections), mlp)


def _layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return _layer_with(dense_mlp(), config, index)


def _moe_layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return _layer_with(ExpertLayer, config, index)


def _mixing_rules(config: PretrainedConfig) -> list[WeightRule]:
    ours, theirs = f"{LAYER}self_attention.", f"{PUBLISHED_LAYER}linear_attn."
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    convolved = (keys, keys, values)
    heads = (config.linear_num_value_heads,)
    projections = tuple(f"{theirs}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    attention = [_gated(rule, head_size(config)) for rule in attention_rules(config)]
    return [
        *attention,
        PartedRows(f"{ours}in_proj.weight", projections, (convolved, (values,), heads, heads)),
        PartedRows(f"{ours}conv1d.weight", (f"{theirs}conv1d.weight",), (convolved,)),
        Rows(f"{ours}A_log", (f"{theirs}A_log",)),
        Rows(f"{ours}dt_bias", (f"{theirs}dt_bias",)),
        Same(f"{ours}out_norm.weight", (f"{theirs}norm.weight",)),
        Columns(f"{ours}out_proj.weight", (f"{theirs}out_proj.weight",)),
    ]


def _gated(rule: WeightRule, size: int) -> WeightRule:
    """Of fused queries, keys and values those with a gate beside each query."""
    if len(rule.published) < 3:
        return rule
    return GatedHeads(rule.megatron, rule.published, size, rule.rows)  # type: ignore[attr-defined]


def _rules(config: PretrainedConfig) -> list[WeightRule]:
    return [*decoder_rules(config), *_mixing_rules(config), *mlp_rules()]


def _moe_rules(config: PretrainedConfig) -> list[WeightRule]:
    return [*decoder_rules(config), *_mixing_rules(config), *gated_expert_rules(), *expert_rules()]


def _fused_moe_rules(config: PretrainedConfig) -> list[WeightRule]:
    """As the model that takes pictures is published."""
    ours, theirs = f"{LAYER}{EXPERTS}", f"{PUBLISHED_LAYER}mlp.experts."
    size = config.moe_intermediate_size
    return [
        *decoder_rules(config),
        *_mixing_rules(config),
        *gated_expert_rules(),
        PartedRows(f"{ours}linear_fc1.weight", (f"{theirs}gate_up_proj[{{expert}}]",), ((size, size),)),
        Columns(f"{ours}linear_fc2.weight", (f"{theirs}down_proj[{{expert}}]",)),
        Same(f"{LAYER}mlp.router.weight", (f"{PUBLISHED_LAYER}mlp.gate.weight",)),
    ]


QWEN3_5 = Family(settings=_settings, layer=_layer, weights=_rules)
QWEN3_5_MOE = Family(settings=_moe_settings, layer=_moe_layer, weights=_moe_rules, fused_weights=_fused_moe_rules)
