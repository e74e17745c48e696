"""What the works of a pass are as tensors, and their hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.pictures import TokenRange, pack, packed_positions
from twinkle.sampler.caches import Caches
from twinkle.sampler.decode_graphs import DecodePass, PassResult, graphs_for
from twinkle.sampler.planning import Work, segments_of
from twinkle.sampler.unread import token_ids_of


class PackedPasses:
    """Runs a sampler's model, with records of passes over single tokens where there are such."""

    def __init__(self, model: FusedLoraModel, caches: Caches, *, graphs: bool = True) -> None:
        self._model, self._caches = model, caches
        self._graphs = graphs_for(model, caches) if graphs else None

    def run(self, works: Sequence[Work]) -> PassResult:
        """Returns what works come to; hidden states last until the next pass."""
        device = self._model.device
        token_ids_T = token_ids_of(works, device)
        ranges = [TokenRange(work.piece.start, work.end, work.progress.layout) for work in works]
        pieces = [work.piece for work in works]
        segments = segments_of([(work.progress.adapter, work.piece.num_tokens) for work in works])

        def launched() -> PassResult:
            positions_T, pictures = pack(ranges, device)
            attention = self._caches.attention(pieces)
            hidden_TH = self._model.run_packed(token_ids_T, positions_T, segments, attention, pictures)
            return hidden_TH, attention.states.commit

        if self._graphs is None or any(work.continuation is None for work in works):
            return launched()
        positions = packed_positions(ranges)
        return self._graphs.run(
            DecodePass(pieces, token_ids_T, positions, segments),  # type: ignore[arg-type]  # there are graphs of pages alone
            launched,
        )

    def close(self) -> None:
        """Gives up what is recorded."""
        if self._graphs is not None:
            self._graphs.clear()
