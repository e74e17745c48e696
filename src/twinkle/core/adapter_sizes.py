"""How large adapters on a model are; without pydantic, which the engine may have to do without."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT_BYTES = 4
SAMPLED_PART = 0.25
"""Of a device's memory for adapters, what copies may take that are sampled from; the rest is for those that train."""


@dataclass(frozen=True, kw_only=True)
class AdapterSizes:
    """What one rank of an adapter adds to it, in parameters, by what it trains: its size is linear in its rank.

    ``copy_bytes`` are those of one parameter in the copy that the model computes with; 0 where it computes in float32.
    """

    attn: int
    mlp: int
    unembed: int
    copy_bytes: int = 0

    def num_parameters(self, rank: int, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> int:
        """Of an adapter of this shape."""
        return rank * (self.attn * train_attn + self.mlp * train_mlp + self.unembed * train_unembed)

    def trained_bytes(self, num_parameters: int) -> int:
        """What an adapter of so many takes of the device at most: weights, gradients, both moments, and the copy."""
        return num_parameters * (4 * FLOAT_BYTES + self.copy_bytes)

    def sampled_bytes(self, num_parameters: int) -> int:
        """What one takes that is only sampled from."""
        return num_parameters * (FLOAT_BYTES + self.copy_bytes)

    @property
    def rank_bytes(self) -> int:
        """What each rank of an adapter that trains everything takes of the device at most."""
        return self.trained_bytes(self.attn + self.mlp + self.unembed)

    def largest_rank(self, num_bytes: int) -> int:
        """Up to which an adapter that trains everything fits into so many bytes."""
        return num_bytes // self.rank_bytes
