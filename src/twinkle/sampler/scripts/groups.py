"""A sampler on a group of devices: each rank has the whole model and continues its share of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput, StaleWeights
from twinkle.data_format.sampling import SampleResponses

INPUTS = "inputs"

Call = tuple[tuple[Any, ...], dict[str, Any]]


def rows_for_each(count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
    """The arguments of ``sample`` for each rank: an even share of the rows; where there are few, some get none."""
    rows = as_rows(kwargs[INPUTS] if INPUTS in kwargs else args[0])
    calls: list[Call] = []
    for rank in range(count):
        share = rows[len(rows) * rank // count : len(rows) * (rank + 1) // count]
        calls.append((args, {**kwargs, INPUTS: share}) if INPUTS in kwargs else ((share, *args[1:]), dict(kwargs)))
    return calls


def joined_responses(shares: Sequence[Any]) -> SampleResponses:
    """The responses of all ranks, in the order of the rows.

    Raises:
        StaleWeights: The ranks have the weights of different syncs.
    """
    responses = SampleResponses(response for share in shares for response in share)
    versions = {response.weights_version for response in responses}
    if len(versions) > 1:
        told = ", ".join(str(version) for version in sorted(versions, key=str))
        raise StaleWeights(f"the sampler's ranks answered with weights versions {told}; call sync_weights again")
    return responses


def as_rows(inputs: Any) -> list[Any]:
    """What a caller of ``sample`` sent, as a list of rows: one row may come alone.

    Raises:
        InvalidInput: It is neither.
    """
    if isinstance(inputs, Mapping):
        return [inputs]
    if not isinstance(inputs, Iterable) or isinstance(inputs, str):
        raise InvalidInput("inputs", f"is {inputs!r}; send a list of rows, or one row")
    rows: list[Any] = list(inputs)
    return [rows] if rows and all(isinstance(token, int) for token in rows) else rows
