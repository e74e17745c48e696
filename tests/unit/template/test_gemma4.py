"""Gemma 4's pictures stand between two tokens that its chat template does not write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from harness.chat_templates import TEXTS
from harness.picture_files import picture_file
from twinkle.hub.tiny import train_tokenizer
from twinkle.model import TransformersModel
from twinkle.template import Gemma4Template

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.content is string %}{{- message.content | trim }}{%- else %}{%- for part in message.content %}
{{- '<|image|>' if part.type == 'image' else part.text | trim }}{%- endfor %}{%- endif %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gemma4")
    tokenizer = train_tokenizer(TEXTS, vocab_size=320, context=4096)
    special = ["<|image|>", "<|image>", "<image|>", "<|turn>", "<turn|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    image, begin, end = tokenizer.convert_tokens_to_ids(special[:3])
    config = transformers.Gemma4Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 512,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 128,
        },
        audio_config=None,
        image_token_id=image,
        boi_token_id=begin,
        eoi_token_id=end,
    )
    torch.manual_seed(3)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(target)
    Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70).save_pretrained(target)
    return target


def test_a_picture_stands_between_its_borders_and_the_model_takes_the_row(folder: Path) -> None:
    template = Gemma4Template(str(folder))
    question = {"role": "user", "content": "<image>What?"}
    answer = {"role": "assistant", "content": "a fox"}

    row = template.encode({"messages": [question, answer], "images": [picture_file(1, width=24, height=16)]})

    is_image = np.flatnonzero(row["mm_token_type_ids"])
    begin, end = template.tokenizer.convert_tokens_to_ids(["<|image>", "<image|>"])
    assert row["input_ids"][is_image[0] - 1] == begin and row["input_ids"][is_image[-1] + 1] == end
    assert len(is_image) == is_image[-1] - is_image[0] + 1 <= 70
    assert row["position_ids"].tolist() == list(range(row["length"]))
    assert template.decode(row["labels"]) == "a fox<turn|>"
    assert template.decode(template.get_vllm_input_ids(row)).startswith("<|turn>user\n<|image|>What?")

    text = template.encode({"messages": [{"role": "user", "content": "Who?"}, answer]})
    model = TransformersModel(model_id=str(folder), model_cls="AutoModelForImageTextToText", mixed_precision="no")
    together = model.forward_only(inputs=[text, row])["logps"]
    alone = model.forward_only(inputs=[row])["logps"]
    is_trained = torch.tensor(row["labels"]) >= 0
    torch.testing.assert_close(together[1][is_trained], alone[0][is_trained], atol=1e-5, rtol=1e-4)
