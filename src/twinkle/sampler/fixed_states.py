"""What layers with a memory remember of the sequences of a recorded pass, where the record finds it.

Caches hold each sequence's states in tensors that never change, so that sequences may share them. A record reads and
writes the same memory every time: states are copied there before it is run, and copied out after it.

Shapes: L layers that are alike, N rows, P tokens that a convolution looks back at, C its channels, H heads, K key size,
V value size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from twinkle.module.packed_states import LayerState, PackedStates
from twinkle.sampler.caches import Cache, Piece


class StateBuffers:
    """Room for the states of so many rows, which all records share.

    Args:
        like: What is remembered of one sequence.
        num_rows: Of the largest record.
    """

    def __init__(self, like: Mapping[int, LayerState], num_rows: int) -> None:
        self.num_rows = num_rows
        alike: dict[tuple[object, ...], list[int]] = {}
        for layer_index, state in like.items():
            alike.setdefault(tuple((each.shape, each.dtype) for each in state), []).append(layer_index)
        self._groups: list[tuple[list[int], LayerState]] = []
        self._place_of: dict[int, tuple[LayerState, int]] = {}
        for layers in alike.values():
            of_one = like[layers[0]]
            room = LayerState(*(each.new_zeros((len(layers), num_rows, *each.shape)) for each in of_one))
            self._groups.append((layers, room))
            self._place_of |= {layer_index: (room, place) for place, layer_index in enumerate(layers)}

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return sum(each.nbytes for _, room in self._groups for each in room)

    def of(self, layer_index: int, num_rows: int) -> LayerState:
        """Where those of a layer are, of the first rows: [N, P, C] and [N, H, K, V]."""
        room, place = self._place_of[layer_index]
        return LayerState(room.past[place, :num_rows], room.state[place, :num_rows])

    def put(self, pieces: Sequence[Piece[Cache]]) -> None:
        """Copy there what is remembered of some sequences, a row each."""
        for layers, room in self._groups:
            for kind, rows_LN in enumerate(room):  # apart: of several dtypes each would be a launch
                places = [row for layer_N in rows_LN[:, : len(pieces)] for row in layer_N]
                values = [piece.cache.states[index][kind] for index in layers for piece in pieces]
                torch._foreach_copy_(places, values)

    def taken(self, num_rows: int) -> list[dict[int, LayerState]]:
        """Copies of what is there now, of each of the first rows."""
        found: list[dict[int, LayerState]] = [{} for _ in range(num_rows)]
        for layers, room in self._groups:
            past_LNPC, state_LNHKV = (each[:, :num_rows].clone() for each in room)
            for place, layer_index in enumerate(layers):
                rows = zip(found, past_LNPC[place].unbind(0), state_LNHKV[place].unbind(0), strict=True)
                for states, past_PC, state_HKV in rows:
                    states[layer_index] = LayerState(past_PC, state_HKV)
        return found


class FixedStates(PackedStates):
    """Of a row of single tokens that all go on from what lies in buffers, and leave behind there what follows."""

    keeps = True

    def __init__(self, buffers: StateBuffers, num_rows: int) -> None:
        super().__init__([(row, row + 1) for row in range(num_rows)])
        self._buffers = buffers
        self._num_rows = num_rows

    def before(self, layer_index: int) -> Sequence[LayerState]:
        """See :class:`PackedStates`."""
        room = self._buffers.of(layer_index, self._num_rows)
        return [LayerState(*state) for state in zip(*(each.unbind(0) for each in room), strict=True)]

    def keep(self, layer_index: int, states: Sequence[LayerState]) -> None:
        """See :class:`PackedStates`; what was there before has been read by now."""
        room = self._buffers.of(layer_index, self._num_rows)
        for rows_N, of_rows in zip(room, zip(*states, strict=True), strict=True):
            torch.stack(of_rows, out=rows_N)
