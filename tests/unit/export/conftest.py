"""Tiny base models for exports, made once."""

import pytest
import torch
import transformers

from harness.exports import add_pieces, add_tokenizer, make_base, make_family
from harness.families import SIZES

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

GGUF_SIZES = {**SIZES, "pad_token_id": 0, "bos_token_id": None}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GGUF_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GGUF_SIZES, tie_word_embeddings=False),
    "llama-tied": lambda: transformers.LlamaConfig(**GGUF_SIZES, tie_word_embeddings=True),
    "llama3-rope": lambda: transformers.LlamaConfig(
        **GGUF_SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE
    ),
    "llama3-tokens": lambda: transformers.LlamaConfig(**GGUF_SIZES, tie_word_embeddings=False),
    "llama2-tokens": lambda: transformers.LlamaConfig(
        **{**GGUF_SIZES, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}, tie_word_embeddings=False
    ),
    "qwen2": lambda: transformers.Qwen2Config(**GGUF_SIZES, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**GGUF_SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3-tied": lambda: transformers.Qwen3Config(**GGUF_SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **GGUF_SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="session")
def family_base(tmp_path_factory):
    """The folder of a tiny model of a family."""
    made = {}

    def folder(family, dtype=torch.float32):
        key = (family, dtype)
        if key not in made:
            made[key] = make_family(tmp_path_factory.mktemp("base"), family, dtype=dtype)
        return made[key]

    return folder


@pytest.fixture(scope="session")
def gguf_base(tmp_path_factory):
    """The folder of a tiny model with a tokenizer, of a kind that is converted to GGUF."""
    made = {}

    def folder(kind, dtype=torch.float32):
        key = (kind, dtype)
        if key not in made:
            made[key] = make_base(tmp_path_factory.mktemp("base"), GGUF_CONFIGS[kind](), dtype=dtype)
            if kind == "llama2-tokens":
                add_pieces(made[key])
            else:
                add_tokenizer(made[key], like_llama3=kind == "llama3-tokens")
        return made[key]

    return folder
