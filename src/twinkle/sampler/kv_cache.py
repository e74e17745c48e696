"""Keys and values of one sequence, and what layers with a memory remember of it.

Each sequence owns contiguous buffers that grow block by block, so memory follows the tokens that exist (contexts may be
32k) and attention over them is the same arithmetic whoever else is in the batch. Copying a buffer once per block costs
1/64 of what attention reads in the meantime.

A layer's memory (see ``twinkle.module.packed_states``) is of one size however long the sequence, and belongs to its
last token: it is taken over only when all of a pass has gone well, so that a pass may be made again.

Shape suffixes: G key-value heads, C capacity in tokens, N new tokens, S tokens so far, D head size; 2 is keys, values,
and 1 the batch of one that attention wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinkle.module.packed_states import LayerState
from twinkle.sampler.caches import KeptTokens, blocks_for, bytes_of_states

BLOCK_TOKENS = 64


@dataclass(frozen=True, eq=False)
class KeptCopies:
    """Copies of the keys and values of a stretch, [2, 1, G, N, D] by layer."""

    layers: dict[int, torch.Tensor]

    @property
    def size_bytes(self) -> int:
        """See :class:`KeptTokens`."""
        return sum(kv_21GND.nbytes for kv_21GND in self.layers.values())

    def release(self) -> None:
        """See :class:`KeptTokens`."""


class SequenceCache:
    """Grows by ``reserve``, is filled by ``write``; a layer's buffer appears with its first write, as only then its
    shape is known.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.states: Mapping[int, LayerState] = {}
        self._layers_21GCD: dict[int, torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return sum(kv_21GCD.nbytes for kv_21GCD in self._layers_21GCD.values()) + bytes_of_states(self.states)

    @property
    def num_blocks_to_fork(self) -> int:
        """See :class:`Cache`."""
        return self.blocks

    def num_missing(self, start: int, end: int) -> int:
        """See :class:`Cache`."""
        return blocks_for(end, BLOCK_TOKENS) - self.blocks

    def make_room(self, start: int, end: int) -> None:
        """See :class:`Cache`."""
        self.reserve(end)

    def reserve(self, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` in all; never shrinks."""
        blocks = blocks_for(num_tokens, BLOCK_TOKENS)
        if blocks <= self.blocks:
            return
        self.blocks = blocks
        for layer, old_21GCD in self._layers_21GCD.items():
            new_21GCD = self._allocate(old_21GCD)
            new_21GCD[:, :, :, : old_21GCD.shape[3]] = old_21GCD
            self._layers_21GCD[layer] = new_21GCD

    def room_for(self, layer: int, start: int, new_21GND: torch.Tensor) -> torch.Tensor:
        """Where new tokens at positions ``start``.. are to be stored, [2, 1, G, N, D]."""
        kv_21GCD = self._layers_21GCD.get(layer)
        if kv_21GCD is None:
            kv_21GCD = self._layers_21GCD[layer] = self._allocate(new_21GND)
        return kv_21GCD.narrow(3, start, new_21GND.shape[3])

    def held(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Keys and values of some positions in their place, [2, 1, G, S, D]."""
        return self._layers_21GCD[layer][:, :, :, start:end]

    def write(self, layer: int, start: int, new_21GND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens at positions ``start``.. and returns all keys and values [1, G, S, D], these included."""
        self.room_for(layer, start, new_21GND).copy_(new_21GND)
        key_1GSD, value_1GSD = self.held(layer, 0, start + new_21GND.shape[3]).unbind(0)
        return key_1GSD, value_1GSD

    def keep(self, start: int, end: int) -> KeptCopies:
        """See :class:`Cache`."""
        copies = {layer: kv_21GCD[:, :, :, start:end].clone() for layer, kv_21GCD in self._layers_21GCD.items()}
        return KeptCopies(copies)

    def take(self, start: int, kept: KeptTokens) -> None:
        """See :class:`Cache`."""
        assert isinstance(kept, KeptCopies)
        for layer, kv_21GND in kept.layers.items():
            self.write(layer, start, kv_21GND)

    def release(self) -> None:
        """See :class:`Cache`."""
        self._layers_21GCD = {}
        self.states = {}

    def fork(self) -> SequenceCache:
        """See :class:`Cache`."""
        copy = SequenceCache()
        copy.blocks = self.blocks
        copy.states = self.states
        copy._layers_21GCD = {layer: kv_21GCD.clone() for layer, kv_21GCD in self._layers_21GCD.items()}
        return copy

    def _allocate(self, like_21GND: torch.Tensor) -> torch.Tensor:
        num_kv_heads, _, head_size = like_21GND.shape[2:]
        return like_21GND.new_empty(2, 1, num_kv_heads, self.blocks * BLOCK_TOKENS, head_size)
