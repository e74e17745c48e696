"""Training examples and prompts as a client writes them: token ids, pictures among them, and a loss's tensors."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from twinkle.client.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32
from twinkle.wire.pictures import WirePicture, format_of
from twinkle.wire.sampling import IMAGE, PromptChunk
from twinkle.wire.training import WireDatum


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture among tokens.

    Attributes:
        data: The bytes of a PNG or JPEG file.
        num_tokens: How many tokens the model makes of it; a prompt may leave it out.
    """

    data: bytes
    num_tokens: int | None = None


Tokens: TypeAlias = npt.ArrayLike | Sequence[npt.ArrayLike | Picture]
"""Token ids (N,); or pieces of them with pictures between."""


@dataclass(frozen=True, eq=False)
class Datum:
    """One example.

    Attributes:
        tokens: What goes into the model, (N,) whole numbers; or a list of such pieces with pictures between.
        inputs: The loss function's tensors by name, mostly (N,): ``target_tokens``, ``weights``, ``logprobs``,
            ``advantages``. Whole numbers travel as int64, everything else as float32.
    """

    tokens: Tokens
    inputs: Mapping[str, npt.ArrayLike]


def next_token_datum(tokens: Sequence[int] | npt.NDArray[Any], weights: npt.ArrayLike | None = None) -> Datum:
    """The usual example of ``cross_entropy``: each token of a text predicts the next.

    Args:
        tokens: (N + 1,) token ids.
        weights: (N,) one for each predicted token; all 1 when left out.

    Raises:
        InvalidInput: There are fewer than two tokens.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size < 2:
        raise InvalidInput("tokens", f"needs one dimension and at least two tokens, not the shape {ids.shape}")
    weights = np.ones(ids.size - 1, np.float32) if weights is None else weights
    return Datum(ids[:-1], {"target_tokens": ids[1:], "weights": weights})


def to_wire(data: Sequence[Datum]) -> tuple[WireDatum, ...]:
    """Checks examples and gives them the types of the wire.

    Raises:
        InvalidInput: Something cannot be sent, with its place.
    """
    if not data:
        raise InvalidInput("data", "has no datums")
    return tuple(_datum_to_wire(datum, f"data[{i}]") for i, datum in enumerate(data))


def to_token_ids(tokens: npt.ArrayLike, *, field: str) -> npt.NDArray[np.int64]:
    """Token ids as int64 (N,).

    Raises:
        InvalidInput: They are not whole numbers in range, in one dimension, at least one.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.size == 0:
        raise InvalidInput(field, f"needs one dimension and at least one token, not the shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise InvalidInput(field, f"needs whole numbers, not {ids.dtype}")
    if ids.min() < 0 or ids.max() > MAX_INT32:
        raise InvalidInput(field, f"needs token ids from 0 to {MAX_INT32}")
    return ids.astype(np.int64)


def to_chunks(prompt: Tokens, *, field: str) -> list[PromptChunk]:
    """A prompt in pieces.

    Raises:
        InvalidInput: A piece cannot be sent.
    """
    chunks: list[PromptChunk] = []
    for piece, place in _pieces(prompt, field):
        if isinstance(piece, Picture):
            encoded = base64.b64encode(piece.data).decode()
            kind = _format_of(piece, place)
            chunks.append(PromptChunk(type=IMAGE, data=encoded, format=kind, expected_tokens=piece.num_tokens))
        else:
            chunks.append(PromptChunk(tokens=to_token_ids(piece, field=place).tolist()))
    return chunks


def _pieces(tokens: Tokens, field: str) -> list[tuple[npt.ArrayLike | Picture, str]]:
    """The pieces, each with its place; one of ids alone is the whole."""
    if isinstance(tokens, list | tuple) and any(isinstance(piece, Picture) for piece in tokens):
        return [(piece, f"{field}[{number}]") for number, piece in enumerate(tokens)]
    return [(cast("npt.ArrayLike", tokens), field)]


def _format_of(picture: Picture, field: str) -> str:
    found = format_of(picture.data)
    if found is None:
        raise InvalidInput(f"{field}.data", "is neither a PNG nor a JPEG file")
    if picture.num_tokens is not None and not 1 <= picture.num_tokens <= MAX_INT32:
        raise InvalidInput(f"{field}.num_tokens", f"is {picture.num_tokens}, must be from 1 to {MAX_INT32}")
    return found


def _datum_to_wire(datum: Datum, field: str) -> WireDatum:
    ids: list[npt.NDArray[np.int64]] = []
    pictures: list[WirePicture] = []
    position = 0
    for piece, place in _pieces(datum.tokens, f"{field}.tokens"):
        if isinstance(piece, Picture):
            _format_of(piece, place)
            if piece.num_tokens is None:
                raise InvalidInput(f"{place}.num_tokens", "is missing; targets have one for each token of a picture")
            pictures.append(WirePicture(position, piece.num_tokens, piece.data))
            # Only where they are counts: the server puts the model's own token there.
            ids.append(np.zeros(piece.num_tokens, dtype=np.int64))
        else:
            ids.append(to_token_ids(piece, field=place))
        position += ids[-1].size
    inputs = {name: _tensor(value, f"{field}.inputs.{name}") for name, value in datum.inputs.items()}
    return WireDatum(np.concatenate(ids), inputs, tuple(pictures))


def _tensor(value: npt.ArrayLike, field: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInput(field, f"is not a tensor: {error}") from error
    if array.dtype.kind in "iu":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    raise InvalidInput(field, f"needs numbers, not {array.dtype}")
