"""Bringing what callers have per row (advantages, logprobs of a sampler or a reference) to the shape of the batch.

Shapes: B rows, T positions (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from twinkle.core.errors import InvalidInput

Rows = torch.Tensor | np.ndarray | Sequence[Any]
"""One entry a row: a number, a list or tensor of them, or as a sampler gives logprobs: ``(token, logprob)`` pairs."""


def align(name: str, values: Rows, mask_BT: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """``values`` as (B, T), zero where the mask is off, in the dtype and on the device of ``like``.

    A (B, T) tensor is taken as it is. Otherwise there is one entry a row, and per row: one value goes to every trained
    position; as many values as trained positions go there in order; T or more values are read at the trained positions.
    A value may be a number, a ``(token, logprob)`` pair, or a list of such pairs whose first is the sampled token.
    Anything else raises ``InvalidInput`` with the row's number.
    """
    if isinstance(values, torch.Tensor) and values.shape == mask_BT.shape:
        return values.to(like).masked_fill(~mask_BT, 0.0)
    rows = _rows(name, values, len(mask_BT))
    aligned_BT = torch.zeros(mask_BT.shape, dtype=like.dtype, device=like.device)
    for index, row in enumerate(rows):
        mask_T = mask_BT[index]
        aligned_BT[index, mask_T] = _fit(f"{name}[{index}]", row.to(like), mask_T)
    return aligned_BT


def _rows(name: str, values: Rows, num_rows: int) -> list[torch.Tensor]:
    entries = [_entry(f"{name}[{index}]", entry) for index, entry in enumerate(values)]
    if num_rows == 1 and len(entries) > 1 and all(len(entry) == 1 for entry in entries):
        entries = [torch.cat(entries)]
    if len(entries) != num_rows:
        raise InvalidInput(name, f"has {len(entries)} entries, the batch {num_rows} rows; send one for each row")
    return entries


def _entry(name: str, entry: Any) -> torch.Tensor:
    if isinstance(entry, (torch.Tensor, np.ndarray)):
        return torch.as_tensor(entry).flatten()
    numbers = [_number(value) for value in entry] if isinstance(entry, Sequence) else entry
    try:
        # Python numbers are doubles; torch would round them to its default of single precision.
        return torch.tensor(numbers, dtype=torch.float64).flatten()
    except (TypeError, ValueError) as error:
        raise InvalidInput(name, "must be numbers or (token, logprob) pairs, one for each token") from error


def _number(value: Any) -> Any:
    """The logprob of a pair, of the first of several pairs; what is no pair as it is."""
    if not isinstance(value, Sequence) or not value:
        return value
    if isinstance(value[0], Sequence):
        return value[0][1] if len(value[0]) == 2 else value
    return value[1] if len(value) == 2 else value


def _fit(name: str, row: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    num_trained = int(mask_T.sum())
    if len(row) == 1:
        return row.expand(num_trained)
    if len(row) == num_trained:
        return row
    if len(row) >= len(mask_T):
        return row[: len(mask_T)][mask_T]
    raise InvalidInput(
        name,
        f"has {len(row)} values; send 1, {num_trained} (the trained positions) or {len(mask_T)} (the row's length)",
    )
