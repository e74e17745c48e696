"""How much of the device adapters take, and may take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

from twinkle.core.adapter import AdapterConfig
from twinkle.core.adapter_sizes import SAMPLED_PART
from twinkle.core.mesh import MeshCapabilities
from twinkle.storage.adapters.adapters import Adapters

_KNOWN = 8192
"""Adapters whose sizes are remembered; a size never changes."""


class AdapterMemory:
    """A bound in bytes for the adapters that train, and one for the copies that are sampled from.

    Args:
        capabilities: The mesh's: its bound, and how large adapters on its model are. Without either there is no bound.
        adapters: Where the shapes of adapters are.
    """

    def __init__(self, capabilities: MeshCapabilities, adapters: Adapters) -> None:
        self._sizes = capabilities.adapter_sizes
        bound = capabilities.adapter_bytes if self._sizes is not None else 0
        self.sampled_bytes = bound if capabilities.serves == "samples" else int(bound * SAMPLED_PART)
        """For copies; 0: no bound."""
        self.trained_bytes = bound - int(bound * SAMPLED_PART)
        """For adapters that train; 0: no bound."""
        self._size_of = lru_cache(_KNOWN)(lambda adapter: self._num_parameters(adapters.find(adapter).config))

    def of(self, adapters: Collection[str]) -> int:
        """What so many adapters take while they train, at most: 0 where there is no bound."""
        if self._sizes is None or not self.trained_bytes:
            return 0
        return self._sizes.trained_bytes(sum(map(self._size_of, adapters)))

    def excess(self, adapters: Collection[str]) -> int:
        """By how much they are too many for it; below zero: what is left."""
        return self.of(adapters) - self.trained_bytes

    def num_fitting(self, adapters: Sequence[str], *, beside: Collection[str] = (), part: float = 1.0) -> int:
        """How many of these, from the first on, fit beside others into it, or into a part of it."""
        left = int(self.trained_bytes * part) - self.of(beside)
        for number, adapter in enumerate(adapters):
            left -= self.of([adapter])
            if left < 0 and self.trained_bytes:
                return number
        return len(adapters)

    def of_copy(self, adapter: str | AdapterConfig) -> int:
        """What a copy of an adapter, or of one of this shape, takes that is sampled from: 0 where there is no bound."""
        if self._sizes is None or not self.sampled_bytes:
            return 0
        size = self._size_of(adapter) if isinstance(adapter, str) else self._num_parameters(adapter)
        return self._sizes.sampled_bytes(size)

    def _num_parameters(self, config: AdapterConfig) -> int:
        assert self._sizes is not None
        return self._sizes.num_parameters(
            config.rank,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
        )
