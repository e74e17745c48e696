"""Qwen's mixtures of experts: Qwen1.5-MoE and Qwen2-MoE, which have a shared expert, and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from twinkle.model.megatron.families.blocks import (
    LAYER,
    PUBLISHED_LAYER,
    Family,
    attention_layer,
    attention_rules,
    decoder_rules,
    dense_mlp,
    dense_settings,
    mlp_rules,
    require_whole_attention,
)
from twinkle.model.megatron.modules.experts import ExpertLayer
from twinkle.model.megatron.weights.rules import Columns, Rows, Same, WeightRule

EXPERTS = "mlp.experts.local_experts.{expert}."


def expert_settings(config: PretrainedConfig, *, num_experts: int) -> dict[str, Any]:
    """How many experts of which size, and that no loss of their balance is added."""
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def expert_rules() -> list[WeightRule]:
    """Of experts that are published one by one."""
    ours, theirs = f"{LAYER}{EXPERTS}", f"{PUBLISHED_LAYER}mlp.experts.{{expert}}."
    return [
        Rows(f"{ours}linear_fc1.weight", (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")),
        Columns(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",)),
        Same(f"{LAYER}mlp.router.weight", (f"{PUBLISHED_LAYER}mlp.gate.weight",)),
    ]


def gated_expert_rules() -> list[WeightRule]:
    """Of a shared expert with a gate of its own."""
    gate = f"{PUBLISHED_LAYER}mlp.shared_expert_gate.weight"
    return [
        *mlp_rules(ours="mlp.shared_experts.", theirs="mlp.shared_expert."),
        Same(f"{LAYER}mlp.shared_experts.gate_weight", (gate,)),
    ]


def gated_expert_settings(config: PretrainedConfig) -> dict[str, Any]:
    """The same in Megatron's words."""
    return {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    require_whole_attention(config)
    settings = {**dense_settings(config), **expert_settings(config, num_experts=config.num_experts)}
    # Weights of the chosen experts that add up to one are those of a softmax over them alone.
    return {**settings, "moe_router_pre_softmax": not config.norm_topk_prob}


def _qwen2_settings(config: PretrainedConfig) -> dict[str, Any]:
    return {**_settings(config), **gated_expert_settings(config), "add_qkv_bias": bool(config.qkv_bias)}


def _qwen3_settings(config: PretrainedConfig) -> dict[str, Any]:
    return {**_settings(config), "add_qkv_bias": bool(config.attention_bias), "qk_layernorm": True}


def _mlp(config: PretrainedConfig, index: int) -> Any:
    is_sparse = index not in (config.mlp_only_layers or ()) and (index + 1) % config.decoder_sparse_step == 0
    return ExpertLayer if is_sparse else dense_mlp()


def _qwen2_layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return attention_layer(mlp=_mlp(config, index), normalised_heads=False)


def _qwen3_layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    return attention_layer(mlp=_mlp(config, index), normalised_heads=True)


def _qwen3_rules(config: PretrainedConfig) -> list[WeightRule]:
    return [*decoder_rules(config), *attention_rules(config), *mlp_rules(), *expert_rules()]


def _qwen2_rules(config: PretrainedConfig) -> list[WeightRule]:
    return [*_qwen3_rules(config), *gated_expert_rules()]


QWEN2_MOE = Family(settings=_qwen2_settings, layer=_qwen2_layer, weights=_qwen2_rules)
QWEN3_MOE = Family(settings=_qwen3_settings, layer=_qwen3_layer, weights=_qwen3_rules)
