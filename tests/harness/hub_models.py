"""Tiny models with all the files that the published ones of their class have, small enough to train in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from harness.hub_data import training_texts
from twinkle.hub.tiny import END_OF_TEXT, TURN_END, train_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH_SIZE, MERGE_SIZE = 4, 2
VOCAB_SIZE, CONTEXT = 420, 2048

# Pictures, reasoning and tools as the published template writes them: one place where a part becomes text, then turns.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is iterable -%}
{%- for part in content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' or 'video' in part -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\n\\nAnswer with a JSON object inside <tool_call></tool_call>.' -}}
{%- if messages[0].role == 'system' -%}{{- '\\n\\n' -}}{{- text_of(messages[0].content) -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- text_of(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\\n<tool_call>\\n' -}}
{{- {'name': function.name, 'arguments': function.arguments} | tojson -}}{{- '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' -}}{{- text_of(message.content) -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' -}}{{- text_of(message.content) -}}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

TEXT_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
}


def _vision_model(tokenizer: PreTrainedTokenizerFast, sizes: dict[str, object]) -> PreTrainedModel:
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    config = transformers.Qwen3_5Config(
        text_config={**sizes, **HYBRID, "tie_word_embeddings": True},
        vision_config=TOWER,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        eos_token_id=sizes["eos_token_id"],
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


CLASSES: dict[str, Callable[[PreTrainedTokenizerFast, dict[str, object]], PreTrainedModel]] = {
    "qwen3_5": _vision_model,
    "qwen3": lambda _, sizes: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)),
    "qwen2": lambda _, sizes: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{key: value for key, value in sizes.items() if key != "head_dim"})
    ),
    "qwen3_moe": lambda _, sizes: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **EXPERTS)),
}
WITH_TOWER = frozenset({"qwen3_5"})


def make_hub_tokenizer() -> PreTrainedTokenizerFast:
    """Few tokens, with those that stand for pictures, and a template that takes lists of parts."""
    tokenizer = train_tokenizer(training_texts(), vocab_size=VOCAB_SIZE - len(VISION_TOKENS), context=CONTEXT)
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_hub_model(folder: Path, model_class: str, *, seed: int = 5) -> Path:
    """Weights in two files with an index, config, tokenizer, template; with a tower what prepares pictures as well."""
    tokenizer = make_hub_tokenizer()
    eos, pad = tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    sizes = {**TEXT_SIZES, "vocab_size": len(tokenizer), "eos_token_id": eos, "pad_token_id": pad}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[model_class](tokenizer, sizes)
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad, bos_token_id=None)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=int(0.6 * size_bytes))
    tokenizer.save_pretrained(folder)
    if model_class in WITH_TOWER:
        save_picture_settings(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nA tiny model of random weights.\n")
    return folder


def save_picture_settings(folder: Path) -> None:
    """The two files that Qwen3-VL and Qwen3.5 publish, which name processors that need torchvision."""
    shared = {
        "patch_size": PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64},
    }
    image = {**shared, "image_processor_type": "Qwen2VLImageProcessorFast"}
    video = {**shared, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))
    file = folder / "tokenizer_config.json"
    settings = {**json.loads(file.read_text()), "processor_class": "Qwen3VLProcessor"}
    file.write_text(json.dumps(settings, indent=2))
