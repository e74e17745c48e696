"""Attention of a packed pass over the sequences' caches: no arithmetic is shared between pieces of sequences.

One call for all pieces where the device has a kernel for it (``twinkle.module.varlen``): what the caches hold is then
laid side by side, layer after layer, which costs a few kernels however many sequences there are. Else one per piece.

Shape suffixes: H query heads, G key-value heads, R query heads per key-value head, T packed tokens,
N tokens of a piece, S tokens of the sequence so far, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from twinkle.module.packed_attention import SequenceRecords
from twinkle.module.scaled_attention import AttentionForm, attend
from twinkle.module.varlen import Ends, Kernel, attend_packed, kernel_for
from twinkle.sampler.caches import Cache, CachedStates, Piece
from twinkle.sampler.kv_cache import SequenceCache


class PieceByPiece:
    """Attends each piece by itself to what its sequence holds."""

    def __init__(self, pieces: Sequence[Piece[Cache]], device: torch.device) -> None:
        self._pieces = pieces
        self._device = device
        self._masks: dict[tuple[int | None, int | None], list[torch.Tensor | None]] = {}

    def attend(
        self,
        query_1HTD: torch.Tensor,
        held: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
        *,
        num_groups: int,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Returns the attended values [1, T, H, D].

        Args:
            query_1HTD: Of all pieces, one after another.
            held: The keys and values [1, G, S, D] of the piece of some number, from some position on; asked in order.
            num_groups: Heads of the keys.
            form: What the layer asks of attention.
        """
        # What each single token needs is laid out for all of them at once; then few operations are left for each.
        query_T1GRD = _grouped_rows(query_1HTD, num_groups=num_groups)
        attended = []
        row = 0
        for number, (piece, mask_NS) in enumerate(zip(self._pieces, self._masks_of(form), strict=True)):
            key_1GSD, value_1GSD = held(number, form.first_key(piece.start))
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

    def _masks_of(self, form: AttentionForm) -> list[torch.Tensor | None]:
        kind = (form.window, form.chunk)
        if kind not in self._masks:
            self._masks[kind] = [_mask(piece, form, self._device) for piece in self._pieces]
        return self._masks[kind]


class CachedAttention:
    """Writes each piece's keys and values into its cache, then attends causally to all the cache holds.

    Pieces are computed in order, so a later piece of the same sequence sees the earlier ones.
    """

    def __init__(self, pieces: Sequence[Piece[SequenceCache]], device: torch.device) -> None:
        self.states = CachedStates(pieces)
        self._pieces = pieces
        self._device = device
        self._apart = PieceByPiece(pieces, device)
        self._ends: dict[int | None, tuple[Ends, Ends]] = {}

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
        new = torch.stack((key_1GTD, value_1GTD)).split([piece.num_tokens for piece in self._pieces], dim=3)
        held = partial(self._written, layer_index, new)
        return self._apart.attend(query_1HTD, held, num_groups=key_1GTD.shape[1], form=form)

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

    def _written(
        self, layer_index: int, new: Sequence[torch.Tensor], number: int, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self._pieces[number]
        key_1GSD, value_1GSD = piece.cache.write(layer_index, piece.start, new[number])
        return (key_1GSD[:, :, first:], value_1GSD[:, :, first:]) if first else (key_1GSD, value_1GSD)

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
        ends = [piece.end for piece in self._pieces]
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


def _mask(piece: Piece[Cache], form: AttentionForm, device: torch.device) -> torch.Tensor | None:
    """A single token sees all keys it is given; the tokens of a first chunk that see its first are plainly causal."""
    end = piece.end
    if piece.num_tokens == 1 or (piece.start == 0 and form.first_key(end - 1) == 0):
        return None
    return form.mask(piece.start, end, form.first_key(piece.start), device)


def _grouped_rows(query_1HTD: torch.Tensor, *, num_groups: int) -> torch.Tensor:
    """The query heads that share a key-value head become its rows: keys and values are read once, not repeated."""
    _, num_heads, num_tokens, head_size = query_1HTD.shape
    return query_1HTD[0].transpose(0, 1).reshape(num_tokens, 1, num_groups, num_heads // num_groups, head_size)
