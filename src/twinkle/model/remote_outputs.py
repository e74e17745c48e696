"""What the data ranks of a group return of one batch, as if it had been one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from twinkle.data_format.answers import ModelOutput


def joined_outputs(results: Sequence[Mapping[str, Any]]) -> ModelOutput:
    """The rows of all outputs in their order, short ones padded with zeros.

    Losses that sum over tokens, and their counts of tokens, are added up; of losses that are means it is the mean.
    """
    if len(results) == 1:
        return ModelOutput(results[0])
    joined = ModelOutput({name: _joined([result.get(name) for result in results]) for name in results[0]})
    if any(result.get("num_tokens", 1) > 1 for result in results):
        joined |= {name: sum(result[name] for result in results) for name in ("loss", "num_tokens")}
    return joined


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if any(value is None for value in values):
        return None
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(_padded(values))
    if isinstance(first, (list, tuple)):
        return [item for value in values for item in value]
    if isinstance(first, (int, float, torch.Tensor)):
        return sum(values) / len(values)
    return first


def _padded(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """All as long in every dimension but the first as the longest of them."""
    longest = [max(value.shape[axis] for value in values) for axis in range(1, values[0].dim())]
    return [
        functional.pad(
            value,
            [end for axis in range(value.dim() - 1, 0, -1) for end in (0, longest[axis - 1] - value.shape[axis])],
        )
        for value in values
    ]
