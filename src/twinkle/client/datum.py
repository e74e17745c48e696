"""Training examples as a client writes them: token ids and a loss function's tensors, from numpy or plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.client.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32
from twinkle.wire.training import WireDatum


@dataclass(frozen=True, eq=False)
class Datum:
    """One example.

    Attributes:
        tokens: What goes into the model, (N,) whole numbers.
        inputs: The loss function's tensors by name, mostly (N,): ``target_tokens``, ``weights``, ``logprobs``,
            ``advantages``. Whole numbers travel as int64, everything else as float32.
    """

    tokens: npt.ArrayLike
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


def _datum_to_wire(datum: Datum, field: str) -> WireDatum:
    tokens = to_token_ids(datum.tokens, field=f"{field}.tokens")
    return WireDatum(tokens, {name: _tensor(value, f"{field}.inputs.{name}") for name, value in datum.inputs.items()})


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
