"""The tokens of a pass sorted by the experts that a router chose for them.

Shapes: T packed tokens, K experts a token, A = T * K assignments of tokens to experts (sorted by expert, then by
token), E experts, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from twinkle.module.packed_products import ExpertRows, LayerUpdates, LoopedProducts, LoopedUpdates, SegmentPair


class Assignments(Protocol):
    """Which token goes to which expert in one pass, and where it stands once they are sorted."""

    @property
    def order_A(self) -> torch.Tensor:
        """Which entry of the flattened choice stands at each sorted place."""
        ...

    @property
    def places_TK(self) -> torch.Tensor:
        """The sorted place of each choice."""
        ...

    @property
    def tokens_A(self) -> torch.Tensor:
        """The token of each sorted place."""
        ...

    @property
    def experts_A(self) -> torch.Tensor:
        """The expert of each sorted place."""
        ...

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
        """``x W_e^T`` [A, O] for the rows of each expert."""
        ...

    def updates(self, path: str) -> LayerUpdates:
        """What the adapters add to the sorted rows of the projection of this path."""
        ...


class LoopedAssignments:
    """Sorted on the host: which rows an (expert, segment) has is known there, and its products are made one by one."""

    def __init__(
        self,
        experts_TK: torch.Tensor,
        num_experts: int,
        products: LoopedProducts,
        pairs_of: Callable[[str], Sequence[SegmentPair]],
    ) -> None:
        self._products = products
        self._pairs_of = pairs_of
        num_tokens, num_choices = experts_TK.shape
        self._num_tokens = num_tokens
        experts_A = experts_TK.reshape(-1).cpu().numpy()
        order_A = np.argsort(experts_A, kind="stable")
        places_A = np.empty_like(order_A)
        places_A[order_A] = np.arange(order_A.size)
        device = experts_TK.device
        self.order_A = torch.from_numpy(order_A).to(device)
        self.places_TK = torch.from_numpy(places_A).to(device).view(num_tokens, num_choices)
        self.tokens_A = self.order_A // num_choices
        self.experts_A = torch.from_numpy(experts_A[order_A]).to(device)
        first_E = np.searchsorted(experts_A[order_A], np.arange(num_experts + 1))
        self._rows = [
            ExpertRows(expert, int(first_E[expert]), int(first_E[expert + 1]))
            for expert in np.flatnonzero(np.diff(first_E)).tolist()
        ]
        # Sorted like the assignments, so that the rows of any (expert, segment) lie between two searches.
        self._sorted_A = experts_A[order_A] * num_tokens + order_A // num_choices

    def by_expert(self, x_AI: torch.Tensor, weight_EOI: torch.Tensor) -> torch.Tensor:
        """See :class:`Assignments`."""
        return self._products.by_expert(x_AI, weight_EOI, self._rows)

    def updates(self, path: str) -> LayerUpdates:
        """See :class:`Assignments`."""
        return LoopedUpdates(self._products, self._split(self._pairs_of(path)))

    def _split(self, pairs: Sequence[SegmentPair]) -> list[SegmentPair]:
        """For each (expert, segment) that has any token the pair of its rows, ordered by expert, then by segment."""
        offsets = np.array([row.expert * self._num_tokens for row in self._rows])[:, None]
        starts = np.searchsorted(self._sorted_A, offsets + [pair.start for pair in pairs]).tolist()
        ends = np.searchsorted(self._sorted_A, offsets + [pair.end for pair in pairs]).tolist()
        return [
            SegmentPair(
                start,
                end,
                pair.scale,
                pair.weight.expert(row.expert),
                None if pair.gradient is None else pair.gradient.expert(row.expert),
            )
            for row, row_starts, row_ends in zip(self._rows, starts, ends, strict=True)
            for pair, start, end in zip(pairs, row_starts, row_ends, strict=True)
            if start < end
        ]
