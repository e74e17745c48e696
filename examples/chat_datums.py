"""From chats to what the Tinker SDK trains on: tokens, shifted targets, and weights on the assistant's tokens only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import tinker
from transformers import PreTrainedTokenizerBase


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


def read_chats(path: Path, *, placeholders: Mapping[str, str] | None = None) -> list[list[Message]]:
    """Returns the chats of a JSON Lines file in OpenAI chat format, with `{placeholder}` replaced by its value."""
    chats: list[list[Message]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        messages: list[Message] = json.loads(line)["messages"]
        for message in messages:
            for name, value in (placeholders or {}).items():
                message["content"] = message["content"].replace("{" + name + "}", value)
        chats.append(messages)
    return chats


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Returns the tokens to sample an answer after: the chat so far and the opening of the assistant's turn."""
    return encode(tokenizer, render(tokenizer, messages, opens_answer=True))


def chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[float]]:
    """Returns a chat's tokens and, for each, 1.0 if the assistant has to produce it, else 0.0.

    The text is split where the assistant begins and ends before it is tokenized, so that a prompt has the same tokens
    here as in `prompt_tokens`. The token that ends the assistant's turn has weight 1.0: it must learn to stop.

    Raises:
        ValueError: The chat template changes earlier turns when later ones are added, so that the assistant's part
            cannot be told apart; or no turn is the assistant's.
    """
    tokens: list[int] = []
    weights: list[float] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = render(tokenizer, messages[:index], opens_answer=True)
        closed = render(tokenizer, messages[: index + 1], opens_answer=False)
        if not (opened.startswith(done) and closed.startswith(opened)):
            raise ValueError(f"the chat template rewrites earlier turns; turn {index} cannot be told apart")
        answer = closed[len(opened) :].rstrip("\n")
        for text, weight in ((opened[len(done) :], 0.0), (answer, 1.0)):
            piece = encode(tokenizer, text)
            tokens += piece
            weights += [weight] * len(piece)
        done = opened + answer
    if not tokens:
        raise ValueError("the chat has no turn of the assistant: there is nothing to learn from it")
    return tokens, weights


def chat_to_datum(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tinker.Datum:
    """Returns one training example for the loss `cross_entropy`: position i of the input predicts target i."""
    tokens, weights = chat_tokens(tokenizer, messages)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
            "weights": tinker.TensorData(data=weights[1:], dtype="float32", shape=[len(tokens) - 1]),
        },
    )


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, opens_answer: bool) -> str:
    """Returns the chat as text in the tokenizer's chat template."""
    turns = [{"role": message["role"], "content": message["content"]} for message in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opens_answer)
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of rendered text, which carries its special tokens already."""
    return list(tokenizer.encode(text, add_special_tokens=False))
