"""Texts cut into tokens, and which of these train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def tokenize(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[Tokens, Flags]:
    """The tokens of a written conversation, and which of them lie in the spans, be it in part."""
    if not tokenizer.is_fast:
        return tokenize_in_pieces(tokenizer, text, spans)
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=bool(spans),
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    tokens = token_ids(encoding["input_ids"])
    is_trained = np.zeros(len(tokens), dtype=bool)
    if spans:
        flat = chain.from_iterable(encoding["offset_mapping"])
        offsets = np.fromiter(flat, dtype=np.int64, count=2 * len(tokens)).reshape(-1, 2)
        for start, end in spans:
            is_trained |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return tokens, is_trained


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
