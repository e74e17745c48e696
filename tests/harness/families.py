"""Tiny configs of the model families that the engine serves."""

from collections.abc import Callable, Mapping

import torch
import transformers
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

VOCAB_SIZE = 307
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
# Where rounding is carried on by a state and decides between experts, large weights would make much of it.
HYBRID_SIZES = {**SIZES, "initializer_range": 0.1}
WITHOUT_MLP = {name: size for name, size in HYBRID_SIZES.items() if name != "intermediate_size"}
WINDOW = 7
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPED_EXPERTS = {**EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
LATENT_SIZES = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
COMPRESSED_SIZES = {
    **{name: size for name, size in HYBRID_SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")},
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 3,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "sliding_window": WINDOW,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
HYBRID_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
NEMOTRON_SIZES = {
    **HYBRID_SIZES,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3-tied": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, num_experts=6),
    # Experts in one layer only, and unlike sums of weights.
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_experts=4, shared_expert_intermediate_size=40
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=WINDOW),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0, sliding_window=WINDOW),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo3": lambda: transformers.Olmo3Config(
        **SIZES, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**HYBRID_SIZES, **HYBRID, rope_parameters=MROPE),
    "qwen3_5-moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **WITHOUT_MLP, **HYBRID, **HYBRID_EXPERTS, shared_expert_intermediate_size=40, rope_parameters=MROPE
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **HYBRID_SIZES, **HYBRID, **HYBRID_EXPERTS, shared_expert_intermediate_size=40, rope_parameters=ROPE
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **NEMOTRON_SIZES, layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    ),
    # Experts in a space of their own, and one group of heads.
    "nemotron-h-latent": lambda: transformers.NemotronHConfig(
        **{**NEMOTRON_SIZES, "n_groups": 1, "use_conv_bias": False},
        moe_latent_size=32,
        layers_block_type=["linear_attention", "moe", "full_attention"],
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, pad_token_id=0),
    "ministral": lambda: transformers.MinistralConfig(**SIZES, head_dim=16, sliding_window=WINDOW),
    "glm": lambda: transformers.GlmConfig(**SIZES, head_dim=16, pad_token_id=0, attention_bias=True),
    "glm4": lambda: transformers.Glm4Config(**SIZES, head_dim=16, pad_token_id=0),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, **GROUPED_EXPERTS, head_dim=16, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(**LATENT_SIZES, **GROUPED_EXPERTS),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **LATENT_SIZES,
        **GROUPED_EXPERTS,
        topk_method="group_limited_greedy",
        n_shared_experts=2,
        first_k_dense_replace=1,
        head_dim=8,
    ),
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **{**LATENT_SIZES, "q_lora_rank": None}, **GROUPED_EXPERTS, topk_method="greedy", head_dim=8
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **LATENT_SIZES, **GROUPED_EXPERTS, n_shared_experts=1, first_k_dense_replace=1
    ),
    # Entries of 4 tokens of which an index picks, entries of more, the last tokens alone; routers by the token.
    "deepseek-v4": lambda: transformers.DeepseekV4Config(
        **{**COMPRESSED_SIZES, "num_hidden_layers": 3},
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4-by-layer": lambda: transformers.Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 4},
        head_dim=16,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **SIZES,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=WINDOW,
        floor_scale=4,
        pad_token_id=0,
    ),
    "cohere": lambda: transformers.CohereConfig(**SIZES, pad_token_id=0, bos_token_id=1, logit_scale=0.25),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0),
    "ernie4.5": lambda: transformers.Ernie4_5Config(**SIZES, head_dim=16),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **SIZES, head_dim=16, bos_token_id=1, num_local_experts=4, num_experts_per_tok=2
    ),
}


def stir(model: torch.nn.Module) -> None:
    """Give every norm, bias and correction that is made as zeros or ones values of its own, so that each counts."""
    generator = torch.Generator().manual_seed(11)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point() and tensor.min() == tensor.max():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    for module in model.modules():
        if isinstance(module, DeepseekV4HashRouter):
            chosen = torch.rand(VOCAB_SIZE, module.num_experts, generator=generator).topk(module.top_k).indices
            module.tid2eid.copy_(chosen)


MODELS = {
    "qwen3": ("Qwen3", "norms on queries and keys"),
    "qwen3-tied": ("Qwen3 to 4B", "one matrix for embedding and output head"),
    "qwen2": ("Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen", "biases on queries, keys, values"),
    "llama": ("Llama 2, Llama 3.x, DeepSeek-R1-Distill-Llama, Yi, InternLM2 (packed matrices taken apart)", ""),
    "llama-tied": ("Llama 3.2 to 3B", "one matrix for embedding and output head"),
    "qwen3-moe": ("Qwen3-30B-A3B, Qwen3-235B-A22B", "experts"),
    "qwen3-moe-mixed": ("Qwen3-MoE with dense layers", "experts in some layers"),
    "qwen2-moe": ("Qwen1.5-MoE, Qwen2-57B-A14B", "experts, one of them shared"),
    "mixtral": ("Mixtral", "experts"),
    "olmoe": ("OLMoE", "experts"),
    "qwen2-windows": ("Qwen2 with windows", "sliding windows in some layers"),
    "mistral": ("Mistral, Mistral-Nemo", "sliding windows"),
    "ministral": ("Ministral", "sliding windows"),
    "gemma": ("Gemma", "scaled embeddings"),
    "gemma2": ("Gemma 2", "capped scores and logits, norms after, sliding windows in some layers"),
    "gemma3": ("Gemma 3 (text)", "a rotary base for each kind of layer"),
    "gemma4-by-layer": ("Gemma 4 E2B, E4B (text)", "inputs for each layer, keys and values shared between layers"),
    "gemma4": ("Gemma 4 31B (text)", "heads of two sizes, keys that are values"),
    "gemma4-moe": ("Gemma 4 26B-A4B (text)", "experts beside an MLP"),
    "phi3": ("Phi-3 with 4k tokens of context", "packed projections"),
    "olmo2": ("OLMo 2", "norms after"),
    "olmo3": ("OLMo 3", "sliding windows in some layers"),
    "qwen3_5": ("Qwen3.5 to 3.8 (`qwen3_5`)", "gated delta nets"),
    "qwen3_5-moe": ("Qwen3.5 and 3.6 with experts (`qwen3_5_moe`)", "gated delta nets, experts, one of them shared"),
    "qwen3-next": ("Qwen3-Next", "gated delta nets, experts, one of them shared"),
    "nemotron-h": ("Nemotron-H, Nemotron-3 Nano (`nemotron_h`)", "Mamba-2, MLPs and experts as layers of their own"),
    "nemotron-h-latent": ("Nemotron-3 Super and Ultra (`nemotron_h`)", "the same, experts in a smaller space"),
    "smollm3": ("SmolLM3", "layers without positions"),
    "glm": ("GLM-4-9B, GLM-Edge; glm-4-9b-chat under its old names (`chatglm`)", "interleaved rotary on half a head"),
    "glm4": ("GLM-4-0414", "the same, norms after"),
    "glm4-moe": ("GLM-4.5, GLM-4.6, GLM-4.7", "experts by sigmoid and group, one of them shared"),
    "glm4-moe-lite": ("GLM-4.7-Flash", "compressed keys and values, experts"),
    "deepseek-v2": ("DeepSeek-V2, V2.5", "compressed keys and values, experts by group, shared ones"),
    "deepseek-v2-lite": ("DeepSeek-V2-Lite", "compressed keys and values, queries plain"),
    "deepseek-v3": (
        "DeepSeek-V3, R1, V3.1; Kimi-K2 (`kimi_k2`) to K2.6 (`kimi_k25`, text)",
        "experts by sigmoid, bias and group",
    ),
    "deepseek-v4": (
        "DeepSeek-V4 (of plain weights)",
        "keys that stand for many tokens, picked by an index; several residual streams; experts by the token",
    ),
    "gpt-oss": ("gpt-oss-20b, gpt-oss-120b", "sinks, experts with biases, sliding windows in some layers"),
    "llama4": ("Llama 4 (text)", "chunks of attention, layers without positions, inputs of experts scaled"),
    "cohere": ("Command R", "scaled logits, one norm for attention and MLP"),
    "granite": ("Granite 3", "scaled embeddings, residuals, scores and logits"),
    "ernie4.5": ("ERNIE 4.5", "interleaved rotary"),
    "minimax-m2": ("MiniMax-M2", "norms over all heads, experts by sigmoid"),
}
"""By family the models that it is, as their makers call them, and what is peculiar about them."""


SAMPLED = (
    *("qwen3-moe", "qwen2-moe", "mistral", "gemma3", "glm4", "glm4-moe", "deepseek-v2", "deepseek-v3", "gemma2"),
    *("gemma4", "gemma4-by-layer", "gemma4-moe", "gpt-oss", "llama4", "granite", "glm", "glm4-moe-lite"),
    *("deepseek-v2-lite", "cohere", "ernie4.5", "minimax-m2", "ministral", "deepseek-v4"),
)
"""One for each peculiarity: the sampler's tests compare them with transformers, those of the engine all others with
training."""
SAMPLED_WITH_STATES = ("qwen3_5", "qwen3_5-moe", "qwen3-next", "nemotron-h", "nemotron-h-latent")
"""The same for layers that carry a state."""

QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE_TOWER = {**TOWER, "image_size": 28, "patch_size": 14}


def _released(
    config_class: Callable[..., transformers.PretrainedConfig],
    text: transformers.PretrainedConfig,
    vision: Mapping[str, object],
    **settings: object,
) -> transformers.PretrainedConfig:
    text.tie_word_embeddings = False
    return config_class(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False, **settings)


def released_qwen3_5() -> transformers.PretrainedConfig:
    """The class that is published: the language model of ``qwen3_5`` beneath a tower for pictures."""
    return transformers.Qwen3_5Config(
        text_config={**HYBRID_SIZES, **HYBRID, "rope_parameters": MROPE, "tie_word_embeddings": False},
        vision_config={**QWEN_TOWER, "num_position_embeddings": 16},
        tie_word_embeddings=False,
    )


def released_qwen3_5_moe() -> transformers.PretrainedConfig:
    """The same with experts."""
    experts = {**HYBRID_EXPERTS, "shared_expert_intermediate_size": 40}
    return transformers.Qwen3_5MoeConfig(
        text_config={**WITHOUT_MLP, **HYBRID, **experts, "rope_parameters": MROPE, "tie_word_embeddings": False},
        vision_config={**QWEN_TOWER, "num_position_embeddings": 16},
        tie_word_embeddings=False,
    )


RELEASED: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3_5": released_qwen3_5,
    "qwen3_5_moe": released_qwen3_5_moe,
    "gemma3": lambda: _released(transformers.Gemma3Config, FAMILIES["gemma3"](), SQUARE_TOWER, mm_tokens_per_image=4),
    "gemma4": lambda: _released(
        transformers.Gemma4Config, FAMILIES["gemma4-by-layer"](), {**TOWER, "num_key_value_heads": 2, "head_dim": 16}
    ),
    "llama4": lambda: _released(
        transformers.Llama4Config,
        FAMILIES["llama4"](),
        {**SQUARE_TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "deepseek_vl": lambda: _released(transformers.DeepseekVLConfig, FAMILIES["llama"](), SQUARE_TOWER),
    "deepseek_vl_hybrid": lambda: _released(
        transformers.DeepseekVLHybridConfig,
        FAMILIES["llama"](),
        SQUARE_TOWER,
        high_res_vision_config={**SQUARE_TOWER, "output_channels": 8, "global_attn_indexes": [0], "mlp_dim": 48},
    ),
    "kimi_k25": lambda: _released(
        transformers.Kimi_K25Config, FAMILIES["deepseek-v3"](), {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4}
    ),
    "mistral3": lambda: _released(transformers.Mistral3Config, FAMILIES["mistral"](), {**SQUARE_TOWER, "head_dim": 16}),
}
"""By their types classes for pictures too, as they are published, whose language model is served without the tower."""
