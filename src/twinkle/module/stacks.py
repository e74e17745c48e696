"""Adapters' matrices as grouped products want them: one tensor for all owners of a pass, in each layer.

Between passes a stack is kept, and only what an adapter has changed is copied again: an update of its weights costs a
few kernels for all layers together. What there is no room for is stacked anew in each layer instead, forward and again
backward.

Shapes: G groups, E experts, I inputs, O outputs, R padded rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from twinkle.module.adapter import LoraAdapter, LoraPair
from twinkle.module.grouped_products import fits_kernel

RANK_MULTIPLE = 8
"""Rows of a stacked matrix must be a multiple of 16 bytes long, in bfloat16 too."""
KEPT_STACKS = 2
"""Training's and sampling's, which take turns."""
PART = 0.5
"""Of the room that the pass leaves, for a new stack."""


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
        self.wanted_bytes = sum(self._size_bytes(shape) for shape in self._shapes.values())
        """What it takes if it is kept."""
        self.is_kept = self.wanted_bytes <= limit_bytes
        if self.is_kept:
            self._pairs = {path: self._zeros(shape) for path, shape in self._shapes.items()}

    @property
    def size_bytes(self) -> int:
        """What it holds."""
        return self.wanted_bytes if self.is_kept else 0

    @property
    def paths(self) -> list[str]:
        """The modules that an owner trains."""
        return list(self._shapes)

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

    def trains(self, path: str) -> bool:
        """Whether any owner trains a module."""
        return path in self._shapes

    def pair(self, path: str) -> LoraPair:
        """A [G, R, I] and B [G, O, R] of a module that an owner trains, zeros beyond each one's rank."""
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

    @torch.inference_mode(False)
    def _zeros(self, shape: StackShape) -> LoraPair:
        """No tensors of inference mode, also where a sampler asks: training reads them, and copies into them."""
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
    """The stacks of the last passes.

    Args:
        shapes: Of all modules that adapters train, by path.
        device: Where they are.
        dtype: What passes compute in.
        room: How much of the device's memory nobody holds, and nobody may take without asking.
    """

    def __init__(
        self, shapes: Mapping[str, StackShape], *, device: torch.device, dtype: torch.dtype, room: Callable[[], int]
    ) -> None:
        self._shapes = {
            path: shape
            for path, shape in shapes.items()
            if fits_kernel(shape.in_features, dtype) and fits_kernel(shape.out_features, dtype)
        }
        self._device, self._dtype = device, dtype
        self._room = room
        self._kept: list[Stack] = []

    def take(self, path: str) -> bool:
        """Whether grouped products can do the updates of this module."""
        return path in self._shapes

    @property
    def size_bytes(self) -> int:
        """What they hold of the device's memory."""
        return sum(stack.size_bytes for stack in self._kept)

    def of(self, owners: Sequence[LoraAdapter | None], *, beside_bytes: int = 0) -> Stack:
        """The stack of these owners, with the weights that they have now, beside a pass that takes so much."""
        found = next((stack for stack in self._kept if stack.belongs_to(owners)), None)
        if found is not None:
            self._kept.remove(found)
        if found is None or not found.is_kept:
            # First, so that it is counted as free.
            self._kept = self._kept[-(KEPT_STACKS - 1) :]
            limit_bytes = int((self._room() - beside_bytes) * PART)
            if found is None or found.wanted_bytes <= limit_bytes:
                found = Stack(owners, self._shapes, device=self._device, dtype=self._dtype, limit_bytes=limit_bytes)
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
