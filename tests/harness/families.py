"""Tiny configs of the model families that the engine serves."""

from collections.abc import Callable

import transformers

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
WINDOW = 7
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
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
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, pad_token_id=0),
}
