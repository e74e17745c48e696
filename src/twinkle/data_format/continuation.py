"""The row of a prompt extended by what was sampled of it; of plain values, so that it survives JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twinkle.core.errors import InvalidInput

IGNORED_LABEL = -100
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What turns sampled tokens into text.

    ``decode`` keeps special tokens, ``read`` leaves them out, ``parse_tool_calls`` finds the calls in a text.
    """

    decode: Decode | None = None
    read: Decode | None = None
    parse_tool_calls: Callable[[str], Any] | None = None


def continued_row(row: Mapping[str, Any], tokens: Sequence[int], *, texts: Texts) -> dict[str, Any]:
    """Returns the row with a continuation appended, every field of the row kept, arrays and tensors as lists.

    Labels are shifted: ``labels[i]`` is the target at position i, so the last prompt position has the first new token.
    """
    row = {name: _plain(value) for name, value in row.items()}
    prompt = token_ids_of(row)
    token_ids = [*prompt, *tokens]
    unshifted = [IGNORED_LABEL] * len(prompt) + list(tokens)
    extended = {
        **{name: value for name, value in row.items() if name != "position_ids"},
        "input_ids": token_ids,
        "labels": [*unshifted[1:], IGNORED_LABEL],
        "attention_mask": [1] * len(token_ids),
        "position_ids": _positions(row.get("position_ids"), len(prompt), len(tokens)),
        "length": len(token_ids),
    }
    if "completion_mask" in row:
        extended["completion_mask"] = [0] * len(prompt) + [1] * len(tokens)
    if "mm_token_type_ids" in row:
        extended["mm_token_type_ids"] = [*np.ravel(row["mm_token_type_ids"]).tolist(), *[0] * len(tokens)]
    if "messages" in row and texts.read is not None:
        extended["messages"] = [*row["messages"], _message(tokens, texts.read, texts)]
    return extended


def token_ids_of(row: Mapping[str, Any]) -> list[int]:
    """The tokens of a row.

    Raises:
        InvalidInput: They are not one row of integers.
    """
    if row.get("input_ids") is None:
        raise InvalidInput("input_ids", "are missing; send an encoded row")
    values = np.asarray(row["input_ids"])
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise InvalidInput("input_ids", f"has shape {values.shape} and type {values.dtype}; send one row of integers")
    token_ids: list[int] = values.tolist()
    return token_ids


def _plain(value: Any) -> Any:
    """Returns a value without arrays and tensors in it; what JSON does not have either (pictures) stays what it is."""
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value


def _message(tokens: Sequence[int], read: Decode, texts: Texts) -> dict[str, Any]:
    text = read(tokens)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    # Some write calls with special tokens, which the text to read lacks.
    whole = text if texts.decode is None else texts.decode(tokens)
    calls = texts.parse_tool_calls(whole) if texts.parse_tool_calls is not None else None
    if calls:
        message["tool_calls"] = calls
    return message


def _positions(given: Any, num_prompt: int, num_tokens: int) -> list[Any]:
    """Those of the row gone on with, for each of its axes: pictures take fewer positions than tokens."""
    if given is None:
        return list(range(num_prompt + num_tokens))
    positions = np.asarray(given)
    if positions.shape[-1] != num_prompt:
        return list(range(num_prompt + num_tokens))
    following = positions.max() + 1 + np.arange(num_tokens)
    added = np.broadcast_to(following, (*positions.shape[:-1], num_tokens))
    whole: list[Any] = np.concatenate([positions, added], axis=-1).tolist()
    return whole
