"""Ranks that make the same calls in the same order, and what they tell each other on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed
from torch.nn import functional

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """All ranks of the world, seen from one of them.

    Every method is a collective: each rank must call it, and it blocks until they have. Alone, nothing is exchanged.
    """

    rank: int = 0
    size: int = 1
    device_number: int | None = None
    """Of this rank's device among those that its process sees; none: as the rank."""

    def gather(self, value: Value) -> list[Value]:
        """What each rank passed, in the order of ranks. Travels pickled, so between our own processes only."""
        values = [value] * self.size
        if self.size > 1:
            distributed.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether a rank passed true."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)])
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        return bool(votes.item())

    def sum_(self, values: torch.Tensor) -> None:
        """Replace a flat buffer on every rank by the sum over the ranks; the same bits on all of them.

        Each rank adds up one stretch of all buffers, rank after rank, and passes it on. A ring would begin each stretch
        with another rank, so that the rounding of an element would depend on where in a buffer it lies.
        """
        if self.size == 1:
            return
        stretch = -(-values.numel() // self.size)
        padded = functional.pad(values, (0, stretch * self.size - values.numel()))
        received = torch.empty_like(padded)
        distributed.all_to_all_single(received, padded)
        first, *others = received.view(self.size, stretch).unbind()
        for other in others:
            first.add_(other)
        distributed.all_gather(list(padded.view(self.size, stretch).unbind()), first)
        values.copy_(padded[: values.numel()])


ALONE = RankGroup()
