"""A chat becomes a datum whose weights mark exactly what the assistant has to produce."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from transformers import PreTrainedTokenizerBase

from twinkle.hub.tiny import train_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who made you?"},
    {"role": "assistant", "content": "A friend made me."},
    {"role": "user", "content": "Really?\n"},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def chat_datums() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chat_datums", EXAMPLES / "chat_datums.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer([message["content"] for message in CHAT], vocab_size=400, context=256)


def test_weights_mark_every_answer_with_its_end_of_turn_and_nothing_else(
    chat_datums: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens, weights = chat_datums.chat_tokens(tokenizer, CHAT)
    learned = [token for token, weight in zip(tokens, weights, strict=True) if weight == 1.0]
    assert tokenizer.decode(learned) == "A friend made me.<|im_end|>Yes.<|im_end|>"
    assert set(weights) == {0.0, 1.0}
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(tokens) == whole.rstrip("\n")


def test_the_input_predicts_the_next_token(chat_datums: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens, weights = chat_datums.chat_tokens(tokenizer, CHAT)
    datum = chat_datums.chat_to_datum(tokenizer, CHAT)
    assert datum.model_input.to_ints() == tokens[:-1]
    assert list(datum.loss_fn_inputs["target_tokens"].data) == tokens[1:]
    assert list(datum.loss_fn_inputs["weights"].data) == weights[1:]


def test_a_prompt_is_the_same_tokens_when_sampled_as_when_trained_on(
    chat_datums: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = chat_datums.prompt_tokens(tokenizer, CHAT[:2])
    tokens, weights = chat_datums.chat_tokens(tokenizer, CHAT[:3])
    assert tokens[: len(prompt)] == prompt
    assert weights == [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))


def test_a_chat_without_an_answer_is_refused(chat_datums: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="nothing to learn"):
        chat_datums.chat_tokens(tokenizer, CHAT[:2])


def test_a_template_that_rewrites_earlier_turns_is_refused(
    chat_datums: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    template = tokenizer.chat_template
    tokenizer.chat_template = "{{ messages | length }}:{{ messages[-1].content }}"
    try:
        with pytest.raises(ValueError, match="rewrites earlier turns"):
            chat_datums.chat_tokens(tokenizer, CHAT)
    finally:
        tokenizer.chat_template = template


def test_placeholders_are_replaced_when_chats_are_read(chat_datums: ModuleType) -> None:
    chats = chat_datums.read_chats(
        EXAMPLES / "data" / "self_cognition.jsonl", placeholders={"name": "Ada", "author": "the team"}
    )
    text = " ".join(message["content"] for chat in chats for message in chat)
    assert "Ada" in text and "the team" in text and "{" not in text
