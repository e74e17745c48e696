"""Attention of a packed pass over the sequences' caches: no arithmetic is shared between pieces of sequences.

One call for all pieces where the device has a kernel for it (``twinkle.module.varlen``): what the caches hold is then
laid side by side, layer after layer, which costs a few kernels however many sequences there are. Else one per piece.

Shape suffixes: H query heads, G key-value heads, R query heads per key-value head, T packed tokens,
N tokens of a piece, S tokens of the sequence so far, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from twinkle.module.packed_attention import SequenceRecords
from twinkle.module.packed_states import LayerState, PackedStates
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.varlen import Ends, Kernel, attend_packed, kernel_for
from twinkle.sampler.kv_cache import SequenceCache


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence, ``start`` being the position of the first."""

    cache: SequenceCache
    start: int
    num_tokens: int


class CachedStates(PackedStates):
    """Layers with a memory go on from what the cache of each piece remembers; what they then remember waits here.

    A sequence may have one piece only: the next one would need what this one leaves behind.
    """

    keeps = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
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


class CachedAttention:
    """Writes each piece's keys and values into its cache, then attends causally to all the cache holds.

    Pieces are computed in order, so a later piece of the same sequence sees the earlier ones.
    """

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        self.states = CachedStates(pieces)
        self._pieces = pieces
        self._device = device
        self._ends: dict[int | None, tuple[Ends, Ends]] = {}
        self._masks: dict[tuple[int | None, int | None], list[torch.Tensor | None]] = {}

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Returns the attended values [1, T, H, D]."""
        kernel = None if form.chunk is not None else kernel_for(query_1HTD, key_1GTD, form)
        if kernel is not None:
            self._write_all(layer_index, torch.stack((key_1GTD, value_1GTD)))
            return self._attend_all(kernel, layer_index, query_1HTD, form)
        # What each single token needs is laid out for all of them at once; then few operations are left for each.
        query_T1GRD = _grouped_rows(query_1HTD, num_groups=key_1GTD.shape[1])
        kv_21GTD = torch.stack((key_1GTD, value_1GTD))
        attended = []
        row = 0
        for piece, mask_NS in zip(self._pieces, self._masks_of(form), strict=True):
            key_1GSD, value_1GSD = piece.cache.write(
                layer_index, piece.start, kv_21GTD.narrow(3, row, piece.num_tokens)
            )
            if first_key := form.first_key(piece.start):
                key_1GSD, value_1GSD = key_1GSD[:, :, first_key:], value_1GSD[:, :, first_key:]
            if piece.num_tokens == 1:
                out_1RGD = attend(query_T1GRD[row], key_1GSD, value_1GSD, form=form)
                attended.append(out_1RGD.transpose(1, 2).reshape(1, 1, query_1HTD.shape[1], -1))
            else:
                query_1HND = query_1HTD.narrow(2, row, piece.num_tokens)
                attended.append(
                    attend(query_1HND, key_1GSD, value_1GSD, form=form, mask=mask_NS, is_causal=mask_NS is None)
                )
            row += piece.num_tokens
        return torch.cat(attended, dim=1)

    def records(self, layer_index: int, records_TR: torch.Tensor) -> Sequence[SequenceRecords]:
        """See :class:`PackedAttention`; records lie in the cache as keys, and their second half as values."""
        found = []
        width = records_TR.shape[1]
        halves_2TD = functional.pad(records_TR, (0, width % 2)).unflatten(1, (2, -1)).transpose(0, 1)
        pieces = halves_2TD[:, None, None].split([piece.num_tokens for piece in self._pieces], dim=3)
        for piece, new_21GND in zip(self._pieces, pieces, strict=True):
            first_1GSD, second_1GSD = piece.cache.write(layer_index, piece.start, new_21GND)
            rows_SR = torch.cat((first_1GSD[0, 0], second_1GSD[0, 0]), dim=1)[:, :width]
            found.append(SequenceRecords(piece.start, rows_SR))
        return found

    def _write_all(self, layer_index: int, kv_21GTD: torch.Tensor) -> None:
        new = kv_21GTD.split([piece.num_tokens for piece in self._pieces], dim=3)
        rooms = [
            piece.cache.room_for(layer_index, piece.start, own) for piece, own in zip(self._pieces, new, strict=True)
        ]
        torch._foreach_copy_(rooms, list(new))

    def _attend_all(
        self, kernel: Kernel, layer_index: int, query_1HTD: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        firsts = [form.first_key(piece.start) for piece in self._pieces]
        ends = [piece.start + piece.num_tokens for piece in self._pieces]
        kv_2GSD = torch.cat(
            [
                piece.cache.held(layer_index, first, end)[:, 0]
                for piece, first, end in zip(self._pieces, firsts, ends, strict=True)
            ],
            dim=2,
        )
        if form.window not in self._ends:
            lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
            queries = Ends([piece.num_tokens for piece in self._pieces], self._device)
            self._ends[form.window] = queries, Ends(lengths, self._device)
        queries, keys = self._ends[form.window]
        rows = (query_1HTD[0], *kv_2GSD.unbind(0))
        return attend_packed(kernel, *(each.transpose(0, 1) for each in rows), queries=queries, keys=keys, form=form)

    def _masks_of(self, form: AttentionForm) -> list[torch.Tensor | None]:
        kind = (form.window, form.chunk)
        if kind not in self._masks:
            self._masks[kind] = [_mask(piece, form, self._device) for piece in self._pieces]
        return self._masks[kind]


def _mask(piece: Piece, form: AttentionForm, device: torch.device) -> torch.Tensor | None:
    """A single token sees all keys it is given; the tokens of a first chunk that see its first are plainly causal."""
    end = piece.start + piece.num_tokens
    if piece.num_tokens == 1 or (piece.start == 0 and form.first_key(end - 1) == 0):
        return None
    return form.mask(piece.start, end, form.first_key(piece.start), device)


def _grouped_rows(query_1HTD: torch.Tensor, *, num_groups: int) -> torch.Tensor:
    """The query heads that share a key-value head become its rows: keys and values are read once, not repeated."""
    _, num_heads, num_tokens, head_size = query_1HTD.shape
    return query_1HTD[0].transpose(0, 1).reshape(num_tokens, 1, num_groups, num_heads // num_groups, head_size)
