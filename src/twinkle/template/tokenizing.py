"""Texts cut into tokens, and which of these train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format.messages import read_messages
from twinkle.data_format.row_error import RowError
from twinkle.template.rendering import Span
from twinkle.template.truncation import IGNORED_LABEL

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


MOST_TOGETHER = 2**17
"""Characters that are cut together: where each token lies takes a hundred bytes a token for so long."""


@dataclass(frozen=True, eq=False)
class Written:
    """A conversation as text, the places in it that train, and the pictures that belong into it."""

    text: str
    spans: Sequence[Span]
    pictures: Sequence[Any] = ()


def tokenize(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[Tokens, Flags]:
    """The tokens of a written conversation, and which of them lie in the spans, be it in part."""
    return next(tokenize_all(tokenizer, [Written(text, spans)]))


def tokenize_all(tokenizer: Any, written: Sequence[Written]) -> Iterator[tuple[Tokens, Flags]]:
    """Those of many, in order. Texts are cut together, which is quicker, and in parallel where processors are idle."""
    if not tokenizer.is_fast:
        for one in written:
            yield tokenize_in_pieces(tokenizer, one.text, one.spans)
        return
    for some in _together(written):
        encoding = tokenizer(
            [one.text for one in some],
            add_special_tokens=False,
            return_offsets_mapping=any(one.spans for one in some),
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        for number, one in enumerate(some):
            tokens = token_ids(encoding["input_ids"][number])
            is_trained = np.zeros(len(tokens), dtype=bool)
            if one.spans:
                flat = chain.from_iterable(encoding["offset_mapping"][number])
                offsets = np.fromiter(flat, dtype=np.int64, count=2 * len(tokens)).reshape(-1, 2)
                for start, end in one.spans:
                    is_trained |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
            yield tokens, is_trained


def tokenize_plain(tokenizer: Any, written: Sequence[Written]) -> Iterator[tuple[Tokens, Flags]]:
    """The tokens of texts that are no conversations, with those that a tokenizer puts around a text."""
    for some in _together(written):
        for one, values in zip(some, tokenizer([one.text for one in some])["input_ids"], strict=True):
            tokens = token_ids(values)
            yield tokens, np.full(len(tokens), bool(one.spans))


def _together(written: Sequence[Written]) -> Iterator[Sequence[Written]]:
    """Stretches of texts that are short together."""
    start, num_characters = 0, 0
    for number, one in enumerate(written):
        if number > start and num_characters + len(one.text) > MOST_TOGETHER:
            yield written[start:number]
            start, num_characters = number, 0
        num_characters += len(one.text)
    if start < len(written):
        yield written[start:]


def tokenize_in_pieces(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[Tokens, Flags]:
    """The same for tokenizers that cannot tell where a token lies: what trains is cut into tokens by itself."""
    pieces: list[tuple[str, bool]] = []
    last = 0
    for start, end in spans:
        pieces += [(text[last:start], False), (text[start:end], True)]
        last = end
    pieces.append((text[last:], False))
    encoded = [
        (np.asarray(tokenizer(piece, add_special_tokens=False)["input_ids"], dtype=np.int64), is_trained)
        for piece, is_trained in pieces
        if piece
    ]
    tokens = token_ids([token for ids, _ in encoded for token in ids])
    return tokens, np.concatenate([np.full(len(ids), is_trained) for ids, is_trained in encoded])


def token_ids(values: Any) -> Tokens:
    """Some tokens; ``RowError`` for none at all."""
    tokens: Tokens = np.asarray(values, dtype=np.int64)
    if not len(tokens):
        raise RowError("messages", "are no tokens at all; send some text")
    return tokens


def shifted(labels: Tokens) -> Tokens:
    """Labels at the places before those they are of."""
    return np.append(labels[1:], IGNORED_LABEL)


def plain_text(trajectory: Mapping[str, Any]) -> str:
    """The text of a row that is no conversation: its ``text``, or its one user message.

    Raises:
        RowError: It is something else.
    """
    if isinstance(trajectory.get("text"), str) and not trajectory.get("messages"):
        return str(trajectory["text"])
    messages = read_messages(trajectory)
    content = messages[0]["content"]
    if len(messages) != 1 or messages[0]["role"] != "user" or not isinstance(content, str):
        raise RowError("messages", "must be one user message of plain text where use_chat_template is off")
    return content
