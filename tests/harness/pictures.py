"""Tiny vision-language models with their image processor, and prompts with tiny pictures for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from harness import families as hybrid
from harness.picture_files import picture_file
from twinkle.hub.image_processor import PROCESSOR_FILE
from twinkle.hub.kimi_image_processor import KimiImageProcessor
from twinkle.model.pictures import Picture

VOCAB_SIZE = 307
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 300, 301, 302, 303
TEXT_TOKENS = 300
"""Ids below it mean text alone."""
PATCH_SIZE, MERGE_SIZE = 4, 2


def text_config(**sizes: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        **sizes,
    }


TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.2,
}
TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
HYBRID = {
    **hybrid.HYBRID,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.1,
    "rope_parameters": hybrid.MROPE,
    "tie_word_embeddings": False,
}
HYBRID_EXPERTS = {**hybrid.HYBRID_EXPERTS, "shared_expert_intermediate_size": 40}
PICTURE_FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3-vl": lambda: transformers.Qwen3VLConfig(
        text_config=text_config(), vision_config=TOWER | DEEPSTACK, **TOKENS
    ),
    "qwen3-vl-moe": lambda: transformers.Qwen3VLMoeConfig(
        text_config=text_config(**EXPERTS), vision_config=TOWER | DEEPSTACK, **TOKENS
    ),
    # No deepstack, and layers that carry a state.
    "qwen3.5": lambda: transformers.Qwen3_5Config(
        text_config=text_config(**HYBRID), vision_config=TOWER | {"num_position_embeddings": 64}, **TOKENS
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeConfig(
        text_config=text_config(**HYBRID, **HYBRID_EXPERTS),
        vision_config=TOWER | {"num_position_embeddings": 64},
        **TOKENS,
    ),
    # No deepstack, windows in the tower, other sections of the rotary embedding.
    "qwen2.5-vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=text_config(),
        vision_config=TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
        **TOKENS,
    ),
    # A tower that takes patches as pictures, positions as of text; what stands for films is beyond the vocabulary.
    "kimi-k2.5": lambda: transformers.Kimi_K25Config(
        text_config={**hybrid.FAMILIES["deepseek-v3"]().to_dict(), "tie_word_embeddings": False},
        vision_config={
            **{name: TOWER[name] for name in ("hidden_size", "intermediate_size", "patch_size", "initializer_range")},
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
            "merge_kernel_size": [MERGE_SIZE, MERGE_SIZE],
        },
        projection_hidden_size=TOWER["hidden_size"],
        tie_word_embeddings=False,
        **{**TOKENS, "video_token_id": VOCAB_SIZE},
    ),
}


PICTURE_MODELS = {
    "qwen3-vl": ("Qwen3-VL", "features added after the first layers (deepstack)"),
    "qwen3-vl-moe": ("Qwen3-VL-30B-A3B, Qwen3-VL-235B-A22B", "the same, experts"),
    "qwen3.5": ("Qwen3.5 to 3.8", "gated delta nets"),
    "qwen3.5-moe": ("Qwen3.5 and 3.6 with experts", "gated delta nets, experts, one of them shared"),
    "qwen2.5-vl": ("Qwen2.5-VL", "windows in the tower"),
    "kimi-k2.5": ("Kimi-K2.5 to K2.6", "compressed keys and values, experts by sigmoid, pictures filled up"),
}
"""By family the models that it is, and what is peculiar about them."""


def image_processor(family: str = "qwen3-vl") -> Any:
    if family == "kimi-k2.5":
        return KimiImageProcessor(patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, max_patches=60, max_side_patches=12)
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=2,
        size={"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def save_picture_model(folder: Path, family: str = "qwen3-vl", *, seed: int = 7) -> Path:
    """Weights, config and image processor, as a released checkpoint has them."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(PICTURE_FAMILIES[family]())
    if family == "kimi-k2.5":
        # Made as zeros, these would let one router take any expert and a tower forget where a patch lies.
        hybrid.stir(model)
    model.save_pretrained(folder)
    processor = image_processor(family)
    if isinstance(processor, KimiImageProcessor):
        published = {
            "patch_size": processor.patch_size,
            "merge_kernel_size": processor.merge_size,
            "in_patch_limit": processor.max_patches,
            "patch_limit_on_one_side": processor.max_side_patches,
            "fixed_output_tokens": None,
        }
        (folder / PROCESSOR_FILE).write_text(json.dumps({"media_proc_cfg": published}))
    else:
        processor.save_pretrained(folder)
    return folder


def num_tokens(width: int, height: int, family: str = "qwen3-vl") -> int:
    """As the image processor itself counts them."""
    made = image_processor(family)(images=[Image.new("RGB", (width, height))], return_tensors="np")
    return int(made["image_grid_thw"].prod()) // MERGE_SIZE**2


def picture_prompt(
    seed: int,
    *,
    before: int = 5,
    after: int = 9,
    sizes: tuple[tuple[int, int], ...] = ((24, 16),),
    group: str = "",
    family: str = "qwen3-vl",
) -> tuple[np.ndarray, tuple[Picture, ...]]:
    """Text, a picture of each size with some text after it."""
    rng = np.random.default_rng(seed)
    tokens = [*rng.integers(3, TEXT_TOKENS, before).tolist()]
    pictures = []
    for number, (width, height) in enumerate(sizes):
        length = num_tokens(width, height, family)
        content = picture_file(100 * seed + number, width=width, height=height)
        tokens.append(VISION_START)
        pictures.append(Picture(len(tokens), length, content, group))
        tokens += [IMAGE_TOKEN] * length + [VISION_END]
        tokens += rng.integers(3, TEXT_TOKENS, after).tolist()
    return np.array(tokens), tuple(pictures)
