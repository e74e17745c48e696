"""How large adapters on a model are; without pydantic, which the engine may have to do without."""

from __future__ import annotations

from dataclasses import dataclass


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
