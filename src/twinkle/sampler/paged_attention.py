"""Attention of a packed pass over pages: what all pieces write goes to its place with one kernel a layer.

One call for all pieces where the device has a kernel that reads pages: our own for a token of each sequence
(``twinkle.module.paged_decode``), torch's for longer pieces (``twinkle.module.paged_varlen``). Where it has one for
packed sequences alone (``twinkle.module.varlen``), keys and values are laid side by side first, with one kernel
a layer. For layers that neither knows, each piece's are gathered and attended by themselves. Where things lie is told
to the device once a pass.

Shape suffixes: H query heads, G key-value heads, T packed tokens, N pages, P positions of a page, M pages of a row of
the table, R rows of it (a piece each), S tokens of the sequence so far, K those of all pieces, D head size; 2 is keys,
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional

from twinkle.infra.sending import send
from twinkle.module.packed_attention import SequenceRecords
from twinkle.module.paged_decode import decode_kernel_for
from twinkle.module.paged_varlen import PagedKeys, paged_kernel_for
from twinkle.module.scaled_attention import AttentionForm
from twinkle.module.varlen import Ends, Kernel, attend_packed, kernel_for
from twinkle.sampler.attention import PieceByPiece
from twinkle.sampler.caches import CachedStates, Piece, blocks_for
from twinkle.sampler.paged_cache import PagedCache
from twinkle.sampler.pages import PagePool


class PagedAttention:
    """Writes each piece's keys and values into its pages, then attends causally to all the sequence has there.

    All pieces are written before any attends, so a later piece of the same sequence sees the earlier ones.
    """

    def __init__(self, pool: PagePool, pieces: Sequence[Piece[PagedCache]], device: torch.device) -> None:
        pool.settle()
        pool.add_reader(self)
        self.states = CachedStates(pieces)
        self._pool = pool
        self._pieces = pieces
        self._are_single = all(piece.num_tokens == 1 for piece in pieces)
        self._apart = PieceByPiece(pieces, device)
        self._slots_T = send(slots_of(pieces, pool.page_tokens, [piece.start for piece in pieces]), torch.int64, device)
        self._queries = Ends([piece.num_tokens for piece in pieces], device)
        self._keys = PagedKeys([piece.end for piece in pieces], table_of(pieces, pool.page_tokens), device)
        self._side_by_side: dict[int | None, tuple[torch.Tensor, Ends]] = {}
        self._device = device

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
        layer_2NPGD = self._pool.write(layer_index, torch.stack((key_1GTD, value_1GTD)), self._slots_T)
        single = decode_kernel_for(query_1HTD, key_1GTD, form) if self._are_single else None
        if single is not None:
            query_SHD = query_1HTD[0].transpose(0, 1)
            lies = {"used_S": self._keys.used_S, "table_SM": self._keys.table_SM}
            return single.attend(query_SHD, *layer_2NPGD.unbind(0), **lies, form=form)
        kernel = paged_kernel_for(query_1HTD, key_1GTD, form)
        if kernel is not None:
            query_THD = query_1HTD[0].transpose(0, 1)
            return kernel.attend(query_THD, *layer_2NPGD.unbind(0), queries=self._queries, keys=self._keys, form=form)
        packed = None if form.chunk is not None else kernel_for(query_1HTD, key_1GTD, form)
        if packed is not None:
            return self._attend_side_by_side(packed, layer_2NPGD, query_1HTD, form)
        held = partial(self._held, layer_2NPGD)
        return self._apart.attend(query_1HTD, held, num_groups=key_1GTD.shape[1], form=form)

    def records(self, layer_index: int, records_TR: torch.Tensor) -> Sequence[SequenceRecords]:
        """See :class:`PackedAttention`; records lie in the pages as keys, and their second half as values."""
        width = records_TR.shape[1]
        halves_2TD = functional.pad(records_TR, (0, width % 2)).unflatten(1, (2, -1)).transpose(0, 1)
        layer_2NPGD = self._pool.write(layer_index, halves_2TD[:, None, None], self._slots_T)
        found = []
        for row, piece in enumerate(self._pieces):
            first_1GSD, second_1GSD = self._held(layer_2NPGD, row, 0)
            rows_SR = torch.cat((first_1GSD[0, 0], second_1GSD[0, 0]), dim=1)[:, :width]
            found.append(SequenceRecords(piece.start, rows_SR))
        return found

    def _attend_side_by_side(
        self, kernel: Kernel, layer_2NPGD: torch.Tensor, query_1HTD: torch.Tensor, form: AttentionForm
    ) -> torch.Tensor:
        if form.window not in self._side_by_side:
            firsts = [form.first_key(piece.start) for piece in self._pieces]
            lengths = [piece.end - first for piece, first in zip(self._pieces, firsts, strict=True)]
            slots_K = send(slots_of(self._pieces, self._pool.page_tokens, firsts), torch.int64, self._device)
            self._side_by_side[form.window] = slots_K, Ends(lengths, self._device)
        slots_K, ends = self._side_by_side[form.window]
        key_KGD, value_KGD = layer_2NPGD.flatten(1, 2).index_select(1, slots_K).unbind(0)
        query_THD = query_1HTD[0].transpose(0, 1)
        return attend_packed(kernel, query_THD, key_KGD, value_KGD, queries=self._queries, keys=ends, form=form)

    def _held(self, layer_2NPGD: torch.Tensor, row: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A piece's keys and values from position ``first`` on, each [1, G, S, D]."""
        end, page_tokens = self._pieces[row].end, self._pool.page_tokens
        pages = slice(first // page_tokens, blocks_for(end, page_tokens))
        lying_2SGD = layer_2NPGD.index_select(1, self._keys.table_SM[row, pages]).flatten(1, 2)
        skipped = first - pages.start * page_tokens
        kv_2GSD = lying_2SGD[:, skipped : skipped + end - first].transpose(1, 2)
        key_1GSD, value_1GSD = kv_2GSD[:, None].unbind(0)
        return key_1GSD, value_1GSD


def slots_of(pieces: Sequence[Piece[PagedCache]], page_tokens: int, firsts: Sequence[int]) -> np.ndarray:
    """Returns where each piece's positions from its first on lie, counting the positions of all pages."""
    slots = []
    for piece, first in zip(pieces, firsts, strict=True):
        positions = np.arange(first, piece.end)
        slots.append(piece.cache.places()[positions // page_tokens] * page_tokens + positions % page_tokens)
    return np.concatenate(slots)


def table_of(pieces: Sequence[Piece[PagedCache]], page_tokens: int) -> np.ndarray:
    """Returns the pages of each piece's sequence up to its end [R, M]; behind those some page that nobody looks at."""
    counts = [blocks_for(piece.end, page_tokens) for piece in pieces]
    table_RM = np.zeros((len(pieces), max(counts)), dtype=np.int32)
    for row_M, piece, count in zip(table_RM, pieces, counts, strict=True):
        row_M[:count] = piece.cache.places()[:count]
    return table_RM
