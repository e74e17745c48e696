"""Adapters' matrices as grouped products want them: one tensor for all owners of a pass, in each layer.

Between passes a stack is kept, and only what an adapter has changed is copied again: an update of its weights costs a
few kernels for all layers together. What does not fit the limit is stacked anew in each layer instead.

Shapes: G groups, E experts, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.grouped_products import fits_kernel

RANK_MULTIPLE = 8
"""Rows of a stacked matrix must be a multiple of 16 bytes long, in bfloat16 too."""
KEPT_STACKS = 2
"""Training's and sampling's, which take turns."""


@dataclass(frozen=True)
class StackShape:
    """How large the matrices of one module are; ``num_experts`` None means one pair."""

    in_features: int
    out_features: int
    num_experts: int | None


class Stack:
    """The matrices of some owners, in their order; None is an owner whose rows get nothing.

    Of experts those of one expert lie together: [E * G, ..].
    """

    def __init__(
        self,
        owners: Sequence[LoraAdapter | None],
        shapes: Mapping[str, StackShape],
        *,
        device: torch.device,
        dtype: torch.dtype,
        limit_bytes: int,
    ) -> None:
        self._owners = [None if owner is None else weakref.ref(owner) for owner in owners]
        self._versions: list[object] = [None] * len(owners)
        self._device, self._dtype = device, dtype
        trained = {path for owner in owners if owner is not None for path in owner.compute_views}
        self._shapes = {path: shape for path, shape in shapes.items() if path in trained}
        ranks = [shape.rank for owner in owners if owner is not None for shape in owner.layout.shapes]
        self.rank = -(-max(ranks, default=1) // RANK_MULTIPLE) * RANK_MULTIPLE
        self._pairs: dict[str, LoraPair] = {}
        size_bytes = sum(self._size_bytes(shape) for shape in self._shapes.values())
        self.is_kept = size_bytes <= limit_bytes
        self.size_bytes = size_bytes if self.is_kept else 0
        if self.is_kept:
            self._pairs = {path: self._zeros(shape) for path, shape in self._shapes.items()}

    @property
    def num_groups(self) -> int:
        """How many owners it has."""
        return len(self._owners)

    def belongs_to(self, owners: Sequence[LoraAdapter | None]) -> bool:
        """Whether these are its owners, in this order."""
        own = [None if owner is None else owner() for owner in self._owners]
        return len(own) == len(owners) and all(mine is one for mine, one in zip(own, owners, strict=True))

    def refresh(self) -> None:
        """Copy the weights that are others than when they were copied last."""
        if not self.is_kept:
            return
        changed: list[tuple[int, LoraAdapter]] = []
        for index, owner in enumerate(self._alive()):
            if owner is not None and self._versions[index] is not owner.version:
                changed.append((index, owner))
                self._versions[index] = owner.version
        self._copy(self._pairs, changed)

    def pair(self, path: str) -> LoraPair | None:
        """A [G, R, I] and B [G, O, R] of a module, zeros beyond each owner's rank; None if no owner trains it."""
        if path not in self._shapes:
            return None
        if self.is_kept:
            return self._pairs[path]
        pair = self._zeros(self._shapes[path])
        self._copy({path: pair}, [(index, owner) for index, owner in enumerate(self._alive()) if owner is not None])
        return pair

    def _alive(self) -> list[LoraAdapter | None]:
        return [None if owner is None else owner() for owner in self._owners]

    @torch.no_grad()
    def _copy(self, pairs: Mapping[str, LoraPair], owners: Sequence[tuple[int, LoraAdapter]]) -> None:
        places: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, owner in owners:
            for path, pair in pairs.items():
                own = owner.compute_views.get(path)
                if own is not None:
                    places += _views(pair, index, self.num_groups, own)
                    values += own
        if places:
            torch._foreach_copy_(places, values)

    def _zeros(self, shape: StackShape) -> LoraPair:
        num_groups = self.num_groups * (shape.num_experts or 1)
        size_a, size_b = (self.rank, shape.in_features), (shape.out_features, self.rank)
        return LoraPair(
            torch.zeros(num_groups, *size_a, dtype=self._dtype, device=self._device),
            torch.zeros(num_groups, *size_b, dtype=self._dtype, device=self._device),
        )

    def _size_bytes(self, shape: StackShape) -> int:
        numel = self.rank * (shape.in_features + shape.out_features)
        return self.num_groups * (shape.num_experts or 1) * numel * self._dtype.itemsize


class AdapterStacks:
    """The stacks of the last passes."""

    def __init__(
        self, shapes: Mapping[str, StackShape], *, device: torch.device, dtype: torch.dtype, limit_bytes: int
    ) -> None:
        self._shapes = {
            path: shape
            for path, shape in shapes.items()
            if fits_kernel(shape.in_features, dtype) and fits_kernel(shape.out_features, dtype)
        }
        self._device, self._dtype = device, dtype
        self._limit_bytes = limit_bytes
        self._kept: list[Stack] = []

    def take(self, path: str) -> bool:
        """Whether grouped products can do the updates of this module."""
        return path in self._shapes

    @property
    def size_bytes(self) -> int:
        """What they hold of the device's memory."""
        return sum(stack.size_bytes for stack in self._kept)

    def of(self, owners: Sequence[LoraAdapter | None]) -> Stack:
        """The stack of these owners, with the weights that they have now."""
        found = next((stack for stack in self._kept if stack.belongs_to(owners)), None)
        if found is None:
            # First, so that never more than the limit is held.
            self._kept = self._kept[-(KEPT_STACKS - 1) :]
            found = Stack(
                owners,
                self._shapes,
                device=self._device,
                dtype=self._dtype,
                limit_bytes=self._limit_bytes // KEPT_STACKS,
            )
        else:
            self._kept.remove(found)
        self._kept.append(found)
        found.refresh()
        return found

    def clear(self) -> None:
        """Give the memory back."""
        self._kept = []

    def give_back(self, num_bytes: int) -> None:
        """Give so many bytes back, those of the passes longest ago first."""
        kept = self.size_bytes - num_bytes
        while self._kept and self.size_bytes > kept:
            del self._kept[0]


def _views(pair: LoraPair, index: int, num_groups: int, own: LoraPair) -> tuple[torch.Tensor, torch.Tensor]:
    """Where one owner's matrices lie in a stack."""
    rank = own.a.shape[-2]
    if own.a.dim() == 2:
        return pair.a[index, :rank], pair.b[index, :, :rank]
    return pair.a[index::num_groups, :rank], pair.b[index::num_groups, :, :rank]
