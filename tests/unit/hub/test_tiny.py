"""A tiny model is a complete model folder that the ordinary loaders accept."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle.core.errors import ConfigError
from twinkle.hub.tiny import SPECIAL_TOKENS, Family, make_tiny_model

TEXTS = ["Who are you? I am a tiny model.", "What is 12 + 7? 12 + 7 = 19", "Ça va? Grüße. 你好"]
SIZES = {"vocab_size": 300, "hidden_size": 64, "layers": 2, "context": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", texts=TEXTS, **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", get_args(Family))
def test_the_ordinary_loaders_accept_every_family(family: Family, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / family, texts=TEXTS, family=family, **SIZES)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert model.config.max_position_embeddings == 128
    logits = model(torch.tensor([tokenizer.encode("Who are you?")])).logits
    assert torch.isfinite(logits).all()


def test_the_end_of_a_turn_ends_generation(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_special_tokens_are_single_tokens_and_any_text_survives_a_round_trip(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [len(tokenizer.encode(token)) for token in SPECIAL_TOKENS] == [1] * len(SPECIAL_TOKENS)
    text = "Grüße 🙂 \n\n\tdef f(): return 3 .5  你好<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_writes_turns_and_opens_the_answer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}]
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == turn
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opened == turn + "<|im_start|>assistant\n"
    without_thinking = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert without_thinking == opened + "<think>\n\n</think>\n\n"


def test_the_chat_template_writes_tools_calls_and_results(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[{"name": "add"}], tokenize=False)
    assert text.count("Be brief.") == 1
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<tool_response>\n2\n</tool_response>" in text


def test_making_it_again_leaves_the_same_folder_untouched(folder: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert make_tiny_model(folder, texts=TEXTS, **SIZES) == folder  # type: ignore[arg-type]
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_seed_decides_the_weights_and_nothing_else_does(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    same = make_tiny_model(tmp_path / "same", texts=TEXTS, **SIZES)  # type: ignore[arg-type]
    other = make_tiny_model(tmp_path / "other", texts=TEXTS, seed=1, **SIZES)  # type: ignore[arg-type]
    weights = "model.safetensors"
    assert (same / weights).read_bytes() == (folder / weights).read_bytes()
    assert (other / weights).read_bytes() != (folder / weights).read_bytes()


def test_a_folder_that_holds_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="holds something else"):
        make_tiny_model(folder, texts=TEXTS, seed=5, **SIZES)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [{"hidden_size": 100}, {"hidden_size": 0}, {"vocab_size": 200}])
def test_a_size_that_no_model_can_have_is_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        make_tiny_model(tmp_path / "model", texts=TEXTS, **sizes)  # type: ignore[arg-type]
