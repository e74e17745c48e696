"""What sequences keep while they are sampled: two kinds of it behind one face.

Contiguous buffers for each sequence (``kv_cache``), which attention reads in place, and pages of a pool that sequences
share (``paged_cache``), where a device has a kernel that reads those. Room is counted in blocks of ``block_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from twinkle.infra.device_memory import DeviceMemory
from twinkle.module.packed_attention import PackedAttention
from twinkle.module.packed_states import LayerState, PackedStates


class KeptTokens(Protocol):
    """Keys and values of a stretch of a prompt, kept for others."""

    @property
    def size_bytes(self) -> int:
        """What it takes, or would if nobody else held it."""
        ...

    def release(self) -> None:
        """Gives it up."""
        ...


class Cache(Protocol):
    """Keys, values and states of one sequence."""

    states: Mapping[int, LayerState]
    """What each layer with a memory remembers of the tokens so far; empty before the first."""

    @property
    def blocks(self) -> int:
        """How many it has, others' share in them aside."""
        ...

    @property
    def num_blocks_to_fork(self) -> int:
        """How many more another continuation of the same tokens takes."""
        ...

    def num_missing(self, start: int, end: int) -> int:
        """How many more blocks are to be had before the positions ``start:end`` can be written."""
        ...

    def make_room(self, start: int, end: int) -> None:
        """Lets the positions ``start:end`` be written, by this sequence alone; never shrinks."""
        ...

    def keep(self, start: int, end: int) -> KeptTokens:
        """Returns the keys and values of some positions, for others to take."""
        ...

    def take(self, start: int, kept: KeptTokens) -> None:
        """Goes on from what another kept, of positions ``start`` on."""
        ...

    def fork(self) -> Cache:
        """Returns one for another continuation of the same tokens."""
        ...

    def release(self) -> None:
        """Gives everything up; it is not used after that."""
        ...


CacheT = TypeVar("CacheT", bound=Cache, covariant=True)


@dataclass(frozen=True)
class Piece(Generic[CacheT]):
    """Consecutive tokens of one sequence, ``start`` being the position of the first."""

    cache: CacheT
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + self.num_tokens


class CachedStates(PackedStates):
    """Layers with a memory go on from what the cache of each piece remembers; what they then remember waits here.

    A sequence may have one piece only: the next one would need what this one leaves behind.
    """

    keeps = True

    def __init__(self, pieces: Sequence[Piece[Cache]]) -> None:
        ends = list(accumulate(piece.num_tokens for piece in pieces))
        super().__init__(list(zip([0, *ends[:-1]], ends, strict=True)))
        self._pieces = pieces
        self._kept: list[dict[int, LayerState]] = [{} for _ in pieces]

    def before(self, layer_index: int) -> Sequence[LayerState | None]:
        """See :class:`PackedStates`."""
        return [piece.cache.states.get(layer_index) for piece in self._pieces]

    def keep(self, layer_index: int, states: Sequence[LayerState]) -> None:
        """See :class:`PackedStates`."""
        for kept, state in zip(self._kept, states, strict=True):
            kept[layer_index] = state

    def commit(self) -> None:
        """Let the caches remember the pass. Until then it can be made again."""
        for piece, kept in zip(self._pieces, self._kept, strict=True):
            if kept:
                piece.cache.states = kept


class CachingAttention(PackedAttention, Protocol):
    """Writes each piece's keys and values into its cache, then attends causally to all that the cache holds."""

    @property
    def states(self) -> CachedStates:
        """See :class:`PackedAttention`."""
        ...


class Caches(Protocol):
    """All caches of one sampler."""

    block_tokens: int

    def new(self) -> Cache:
        """Returns an empty one."""
        ...

    def attention(self, pieces: Sequence[Piece[Cache]]) -> CachingAttention:
        """Returns what a pass over some pieces attends with, which may be used until the caches change."""
        ...

    def num_blocks(self, caches: Iterable[Cache]) -> int:
        """How many blocks some caches hold together."""
        ...

    def num_held(self, every: Iterable[Cache]) -> int:
        """How many blocks are held in all, given every cache that is in use."""
        ...

    def size_bytes(self, every: Iterable[Cache]) -> int:
        """What every cache that is in use takes of the device's memory."""
        ...

    def live_in(self, memory: DeviceMemory, *, num_blocks: int, kept_bytes: int) -> None:
        """Sequences will hold no more blocks than these, and computed prompts no more memory; said before the first."""
        ...

    @property
    def shared_bytes(self) -> int:
        """How much of what is kept takes no memory, since it is counted already."""
        ...

    def give_back_unused(self) -> None:
        """Lets the device have what nobody holds."""
        ...


def bytes_of_states(states: Mapping[int, LayerState]) -> int:
    """What is remembered of one sequence takes."""
    return sum(tensor.nbytes for state in states.values() for tensor in state)


def copies_of_states(states: Mapping[int, LayerState]) -> dict[int, LayerState]:
    """Copies of it: what is kept for long must not hold on to all of a pass."""
    return {layer: LayerState(*(tensor.clone() for tensor in state)) for layer, state in states.items()}


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-num_tokens // block_tokens)
