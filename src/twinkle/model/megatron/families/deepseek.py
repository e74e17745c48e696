"""DeepSeek-V2 (and V2.5) and V3 (and R1): latent attention, a few dense layers, then experts in groups."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import PretrainedConfig

from twinkle.core.errors import ConfigError
from twinkle.model.megatron.families.blocks import (
    LAYER,
    PUBLISHED_LAYER,
    Family,
    decoder_layer,
    decoder_rules,
    dense_mlp,
    dense_settings,
    mlp_rules,
)
from twinkle.model.megatron.families.qwen_moe import expert_rules, expert_settings
from twinkle.model.megatron.modules.attention import PackedCoreAttention
from twinkle.model.megatron.modules.experts import ExpertLayer
from twinkle.model.megatron.modules.latent import LatentAttention, LatentSubmodules
from twinkle.model.megatron.modules.norm import RootMeanSquareNorm
from twinkle.model.megatron.weights.rules import Columns, Rows, Same, WeightRule

PLAIN, STRETCHED = "default", "yarn"
GROUPS = "group_limited_greedy"


def _latent_settings(config: PretrainedConfig) -> dict[str, Any]:
    if config.attention_bias:
        raise ConfigError("model_id: its latent attention has biases (attention_bias); use TransformersModel")
    return {
        **dense_settings(config),
        "multi_latent_attention": True,
        "num_query_groups": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rotary_base": config.rope_parameters["rope_theta"],
        **_positions(config),
    }


def _positions(config: PretrainedConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    if rope["rope_type"] == PLAIN:
        return {"rope_type": "rope"}
    if rope["rope_type"] != STRETCHED or rope.get("attention_factor") is not None:
        raise ConfigError(
            f"model_id: its rope_parameters are {rope}; latent attention takes rope_type {PLAIN!r} or {STRETCHED!r}"
            " without attention_factor, use TransformersModel"
        )
    return {
        "rope_type": STRETCHED,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope.get("original_max_position_embeddings")
        or config.max_position_embeddings,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _expert_settings(config: PretrainedConfig) -> dict[str, Any]:
    return {
        **expert_settings(config, num_experts=config.n_routed_experts),
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_dtype": "fp32",
    }


def _in_groups(config: PretrainedConfig) -> dict[str, Any]:
    return {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}


def _v2_settings(config: PretrainedConfig) -> dict[str, Any]:
    groups = _in_groups(config) if config.topk_method == GROUPS else {}
    return {**_latent_settings(config), **_expert_settings(config), **groups, "moe_router_pre_softmax": True}


def _v3_settings(config: PretrainedConfig) -> dict[str, Any]:
    if not (config.rope_interleave and config.norm_topk_prob):
        raise ConfigError(
            "model_id: rope_interleave and norm_topk_prob are true of the models that are trained here; use"
            " TransformersModel"
        )
    return {
        **_latent_settings(config),
        **_expert_settings(config),
        **_in_groups(config),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def _layer(settings: TransformerConfig, config: PretrainedConfig, index: int) -> ModuleSpec:
    attention = ModuleSpec(
        module=LatentAttention,
        submodules=LatentSubmodules(
            column=ColumnParallelLinear,
            row=RowParallelLinear,
            core_attention=PackedCoreAttention,
            norm=RootMeanSquareNorm,
        ),
    )
    return decoder_layer(attention, dense_mlp() if index < (config.first_k_dense_replace or 0) else ExpertLayer)


def _rules(config: PretrainedConfig) -> list[WeightRule]:
    ours, theirs = f"{LAYER}self_attention.", f"{PUBLISHED_LAYER}self_attn."
    return [
        *decoder_rules(config),
        Rows(f"{ours}linear_q_proj.weight", (f"{theirs}q_proj.weight",)),
        Rows(f"{ours}linear_q_down_proj.weight", (f"{theirs}q_a_proj.weight",)),
        Same(f"{ours}q_layernorm.weight", (f"{theirs}q_a_layernorm.weight",)),
        Rows(f"{ours}linear_q_up_proj.weight", (f"{theirs}q_b_proj.weight",)),
        Rows(f"{ours}linear_kv_down_proj.weight", (f"{theirs}kv_a_proj_with_mqa.weight",)),
        Same(f"{ours}kv_layernorm.weight", (f"{theirs}kv_a_layernorm.weight",)),
        Rows(f"{ours}linear_kv_up_proj.weight", (f"{theirs}kv_b_proj.weight",)),
        Columns(f"{ours}linear_proj.weight", (f"{theirs}o_proj.weight",)),
        *mlp_rules(),
        *expert_rules(),
        *mlp_rules(ours="mlp.shared_experts.", theirs="mlp.shared_experts."),
    ]


def _v3_rules(config: PretrainedConfig) -> list[WeightRule]:
    bias = f"{PUBLISHED_LAYER}mlp.gate.e_score_correction_bias"
    return [*_rules(config), Same(f"{LAYER}mlp.router.expert_bias", (bias,))]


DEEPSEEK_V2 = Family(settings=_v2_settings, layer=_layer, weights=_rules, config_class=MLATransformerConfig)
DEEPSEEK_V3 = Family(settings=_v3_settings, layer=_layer, weights=_v3_rules, config_class=MLATransformerConfig)
