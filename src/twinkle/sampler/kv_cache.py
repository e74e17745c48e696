"""Keys and values of one sequence.

Each sequence owns contiguous buffers that grow block by block, so memory follows the tokens that exist (contexts may be
32k) and attention over them is the same arithmetic whoever else is in the batch. Copying a buffer once per block costs
1/64 of what attention reads in the meantime.

Shape suffixes: G key-value heads, C capacity in tokens, N new tokens, S tokens so far, D head size; 2 is keys, values.
"""

from __future__ import annotations

import torch

BLOCK_TOKENS = 64


def blocks_for(num_tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class SequenceCache:
    """Grows by ``reserve``, is filled by ``write``; a layer's buffer appears with its first write, as only then its
    shape is known.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self._layers_2GCD: dict[int, torch.Tensor] = {}

    def reserve(self, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` in all; never shrinks."""
        blocks = blocks_for(num_tokens)
        if blocks <= self.blocks:
            return
        self.blocks = blocks
        for layer, old_2GCD in self._layers_2GCD.items():
            new_2GCD = self._allocate(old_2GCD[0])
            new_2GCD[:, :, : old_2GCD.shape[2]] = old_2GCD
            self._layers_2GCD[layer] = new_2GCD

    def write(
        self, layer: int, start: int, key_1GND: torch.Tensor, value_1GND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new tokens at positions ``start``.. and returns all keys and values [1, G, S, D], these included."""
        if layer not in self._layers_2GCD:
            self._layers_2GCD[layer] = self._allocate(key_1GND[0])
        kv_2GCD = self._layers_2GCD[layer]
        end = start + key_1GND.shape[2]
        kv_2GCD[0, :, start:end] = key_1GND[0]
        kv_2GCD[1, :, start:end] = value_1GND[0]
        return kv_2GCD[:1, :, :end], kv_2GCD[1:, :, :end]

    def fork(self) -> SequenceCache:
        """Returns a copy for another continuation of the same tokens."""
        copy = SequenceCache()
        copy.blocks = self.blocks
        copy._layers_2GCD = {layer: kv_2GCD.clone() for layer, kv_2GCD in self._layers_2GCD.items()}
        return copy

    def _allocate(self, like_GND: torch.Tensor) -> torch.Tensor:
        num_kv_heads, _, head_size = like_GND.shape
        return like_GND.new_empty(2, num_kv_heads, self.blocks * BLOCK_TOKENS, head_size)
