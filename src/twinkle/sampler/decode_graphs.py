"""Passes over one token of each sequence, recorded once and run again with one launch, where a device has graphs.

A small model's step takes a GPU a fraction of what it takes the host to launch its hundreds of kernels one by one. What
changes between two such steps (tokens, positions, places, lengths, whose adapters) lies in tensors that stay where they
are; how many sequences there are, and how many pages the longest has, is padded to powers of two. So there is a record
for each such shape. It is made when its shape has been met a few times, and is held against the pass as it is made
otherwise before it is trusted. Where pages move to other memory all records end, and of models with experts where
other owners' matrices are stacked.

Shape suffixes: N rows, padded; M pages of a row of the table; H hidden size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import torch

from twinkle.core.process.events import event_log
from twinkle.infra.recorded import Recorder, recorder_for
from twinkle.infra.sending import FixedParcel
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.packed_attention import SequenceRecords
from twinkle.module.packed_states import PackedStates
from twinkle.module.paged_decode import decode_kernel_for
from twinkle.module.scaled_attention import AttentionForm
from twinkle.module.segmented import Segment
from twinkle.module.stacks import Stack
from twinkle.module.tabled import FixedRoute
from twinkle.sampler.cache_kinds import PagedCaches
from twinkle.sampler.caches import Caches, Piece
from twinkle.sampler.fixed_states import FixedStates, StateBuffers
from twinkle.sampler.paged_attention import slots_of, table_of
from twinkle.sampler.paged_cache import PagedCache
from twinkle.sampler.pages import Page, PagePool

MET_BEFORE = 4
"""As many passes of a shape are made otherwise first: a record costs about as much."""
MOST_RECORDS = 64
"""Of one sampler; more shapes than a service meets."""
PASSES_WITHOUT = 1000
"""Until it is tried again after there was no memory for a record, or it was wrong."""
MOST_WRONG = 3
"""Records; no more are made."""
PART = 0.5
"""Of the room that there is, at most, for the states of a record's sequences."""
TOLERANCE = 0.05
"""Relative, of hidden states in half precision, which products of other shapes round otherwise."""

PassResult = tuple[torch.Tensor, Callable[[], None]]
"""The hidden states [T, H], and what lets the caches remember the pass: until then it can be made again."""

_log = event_log()


@dataclass(frozen=True)
class Shape:
    """What a record is good for: so many rows, pages of the longest, rank of the largest adapter, axes of positions."""

    num_rows: int
    num_pages: int
    rank: int
    axes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DecodePass:
    """One token of each of some sequences.

    Args:
        pieces: Where each token goes.
        token_ids: Of them [T], on the device.
        positions: Of them, [T] or with pictures [3, T].
        segments: Whose they are.
    """

    pieces: Sequence[Piece[PagedCache]]
    token_ids: torch.Tensor
    positions: np.ndarray
    segments: Sequence[Segment]


class FixedPages:
    """Attention of one token of each sequence, where its tensors say that things lie."""

    def __init__(
        self,
        pool: PagePool,
        states: PackedStates,
        slots_N: torch.Tensor,
        used_N: torch.Tensor,
        table_NM: torch.Tensor,
    ) -> None:
        self.states = states
        self._pool = pool
        self._slots_N, self._used_N, self._table_NM = slots_N, used_N, table_NM

    def __call__(
        self,
        layer_index: int,
        query_1HTD: torch.Tensor,
        key_1GTD: torch.Tensor,
        value_1GTD: torch.Tensor,
        *,
        form: AttentionForm,
    ) -> torch.Tensor:
        """Returns the attended values [1, N, H, D]."""
        kernel = decode_kernel_for(query_1HTD, key_1GTD, form)
        if kernel is None:
            raise NotImplementedError(f"layer {layer_index} attends in a form that no kernel of ours has")
        layer_2NPGD = self._pool.write(layer_index, torch.stack((key_1GTD, value_1GTD)), self._slots_N)
        query_NHD = query_1HTD[0].transpose(0, 1)
        return kernel.attend(query_NHD, *layer_2NPGD.unbind(0), used_S=self._used_N, table_SM=self._table_NM, form=form)

    def records(self, layer_index: int, records_TR: torch.Tensor) -> Sequence[SequenceRecords]:
        """See :class:`PackedAttention`."""
        raise NotImplementedError(f"layer {layer_index} keeps records of its own")


class _RecordedPass:
    """A record and the tensors that it reads. It is made for rows of nobody: nothing of a real pass is in it."""

    def __init__(
        self,
        shape: Shape,
        model: FusedLoraModel,
        pool: PagePool,
        spare: Page,
        route: FixedRoute,
        buffers: StateBuffers | None,
        recorder: Recorder,
    ) -> None:
        self._shape, self._pool, self._spare, self._route, self._buffers = shape, pool, spare, route, buffers
        num_rows = shape.num_rows
        self._token_ids_N = token_ids_N = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
        self._parcel = FixedParcel(
            [
                ((*shape.axes, num_rows), torch.int64),
                ((num_rows,), torch.int64),
                ((num_rows,), torch.int32),
                ((num_rows, shape.num_pages), torch.int32),
            ],
            model.device,
        )
        self._tell(self._blank(), [])
        positions, slots_N, used_N, table_NM = self._parcel.tensors
        states = PackedStates([]) if buffers is None else FixedStates(buffers, num_rows)
        # It is kept, as what it has sent once is read by every run.
        self._attention = attention = FixedPages(pool, states, slots_N, used_N, table_NM)
        self._again = recorder.record(lambda: model.run_packed(token_ids_N, positions, route, attention))

    def run(self, decoded: DecodePass) -> torch.Tensor:
        """Returns the hidden states [T, H], which are there until another record is run."""
        if self._buffers is not None:
            self._buffers.put(decoded.pieces)
        pieces, page_tokens = decoded.pieces, self._pool.page_tokens
        arrays = positions, slots_N, used_N, table_NM = self._blank()
        here = len(pieces)
        positions[..., :here] = decoded.positions
        slots_N[:here] = slots_of(pieces, page_tokens, [piece.start for piece in pieces])
        used_N[:here] = [piece.end for piece in pieces]
        lying = table_of(pieces, page_tokens)
        table_NM[:here, : lying.shape[1]] = lying
        self._token_ids_N[:here].copy_(decoded.token_ids)
        self._tell(arrays, decoded.segments)
        return self._again()[:here]

    def _blank(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Rows that nobody reads, which see nothing and write where nobody looks."""
        num_rows = self._shape.num_rows
        return (
            np.zeros((*self._shape.axes, num_rows), np.int64),
            np.full(num_rows, self._spare.index * self._pool.page_tokens, np.int64),
            np.zeros(num_rows, np.int32),
            np.zeros((num_rows, self._shape.num_pages), np.int32),
        )

    def _tell(self, arrays: Sequence[np.ndarray], segments: Sequence[Segment]) -> None:
        self._parcel.send(arrays)
        self._route.tell(segments)


class DecodeGraphs:
    """The records of one sampler."""

    def __init__(self, model: FusedLoraModel, pool: PagePool, recorder: Recorder) -> None:
        self._model, self._pool, self._recorder = model, pool, recorder
        self._passes: dict[Shape, _RecordedPass] = {}
        self._met: Counter[Shape] = Counter()
        self._spare: Page | None = None
        self._buffers: StateBuffers | None = None
        self._tensor_epoch = -1
        self._stack: Callable[[], Stack | None] = _nothing
        self._passes_to_wait: float = 0
        self._num_wrong = 0
        model.memory.add_guest("recorded passes", self)

    @property
    def size_bytes(self) -> int:
        """See :class:`Guest`."""
        of_page = 0 if self._spare is None else self._pool.page_bytes
        of_states = 0 if self._buffers is None else self._buffers.size_bytes
        return self._recorder.size_bytes + of_page + of_states

    def give_back(self, num_bytes: int) -> None:
        """See :class:`Guest`; all of it, whatever is wanted."""
        del num_bytes
        self.clear()

    def clear(self) -> None:
        """All records end."""
        self._passes.clear()
        self._met.clear()
        self._recorder.clear()
        self._buffers = None
        if self._spare is not None:
            self._pool.drop_spare(self._spare)
            self._spare = None

    @torch.inference_mode()
    def run(self, decoded: DecodePass, otherwise: Callable[[], PassResult]) -> PassResult:
        """Returns what a pass comes to, from a record or ``otherwise``; hidden states last until the next one."""
        if self._passes_to_wait > 0:
            self._passes_to_wait -= 1
            return otherwise()
        self._pool.settle()
        stack = self._model.pool.stack_of_experts(decoded.segments)
        if stack is not None and not stack.is_kept:
            self.clear()  # it may find room where records are
            return otherwise()
        if self._pool.tensor_epoch != self._tensor_epoch or stack is not self._stack():
            self.clear()
            self._tensor_epoch = self._pool.tensor_epoch
            self._stack = _nothing if stack is None else weakref.ref(stack)
        shape = self._shape_of(decoded)
        known = self._passes.get(shape)
        if known is not None:
            hidden_TH = known.run(decoded)
            return hidden_TH, self._remembering(decoded)
        self._met[shape] += 1
        found = otherwise()
        is_due = self._met[shape] > MET_BEFORE and len(self._passes) < MOST_RECORDS
        if is_due and not self._is_recorded(shape, decoded, stack, found[0]):
            # What was run to be compared has written keys and values, over those of the pass.
            return otherwise()
        return found

    def _remembering(self, decoded: DecodePass) -> Callable[[], None]:
        """Lets each cache remember what its row has come to, which is copied now."""
        if self._buffers is None:
            return _nothing
        found = self._buffers.taken(len(decoded.pieces))

        def remember() -> None:
            for piece, states in zip(decoded.pieces, found, strict=True):
                piece.cache.states = states

        return remember

    def _shape_of(self, decoded: DecodePass) -> Shape:
        most = max(len(piece.cache.pages) for piece in decoded.pieces)
        rank = self._model.pool.padded_rank({segment.adapter for segment in decoded.segments})
        return Shape(_padded(len(decoded.pieces)), _padded(most), rank, decoded.positions.shape[:-1])

    def _is_recorded(self, shape: Shape, decoded: DecodePass, stack: Stack | None, right_TH: torch.Tensor) -> bool:
        """Whether there is a record now that gives these hidden states; says why not."""
        reason = None
        try:
            reason = self._record(shape, decoded, stack, right_TH)
            self._num_wrong += reason is not None
        except torch.OutOfMemoryError:
            self.clear()
            self._passes_to_wait = PASSES_WITHOUT
            _log.info("sampler.no_memory_to_record", rows=shape.num_rows, next="passes are launched kernel by kernel")
            return False
        except Exception as error:  # noqa: BLE001 - models are of many classes, and what cannot be recorded is of any type
            reason = str(error).partition("\n")[0]
            self._num_wrong = MOST_WRONG
        if reason is not None:
            self.clear()
            # Routers may choose other experts for a rounding's sake, once.
            self._passes_to_wait = PASSES_WITHOUT if self._num_wrong < MOST_WRONG else inf
            _log.warning(
                "sampler.cannot_record",
                architecture=self._model.info.architecture,
                reason=reason,
                next="passes are launched kernel by kernel, slower for small models",
            )
        return reason is None

    def _record(self, shape: Shape, decoded: DecodePass, stack: Stack | None, right_TH: torch.Tensor) -> str | None:
        """Why a record is not right, if it is not."""
        spare = self._spare
        if spare is None:
            # For its page all may be moved, and others, such as these records, may have to give way.
            spare = self._pool.take_spare()
            try:
                self._pool.settle()
            except torch.OutOfMemoryError:
                self._pool.drop_spare(spare)
                raise
            self._spare, self._tensor_epoch = spare, self._pool.tensor_epoch
        route = self._model.pool.fixed_route(shape.num_rows, shape.rank, decoded.segments, stack)
        if self._model.remembers and (self._buffers is None or self._buffers.num_rows < shape.num_rows):
            # The other records read the old ones.
            self._passes.clear()
            self._recorder.clear()
            self._buffers = None
            num_bytes = shape.num_rows * self._model.state_bytes
            if num_bytes > self._model.memory.room_for_guests * PART:
                raise torch.OutOfMemoryError(f"{num_bytes} bytes for states")
            self._buffers = StateBuffers(decoded.pieces[0].cache.states, shape.num_rows)
        made = _RecordedPass(shape, self._model, self._pool, spare, route, self._buffers, self._recorder)
        error = relative_error(made.run(decoded), right_TH)
        if not error < TOLERANCE:
            return f"its hidden states are off by {error:.2g}"
        self._passes[shape] = made
        return None


def relative_error(found_TH: torch.Tensor, right_TH: torch.Tensor) -> float:
    """Returns by how much hidden states differ, by norm. Rows that are not finite, as an adapter may make them, are
    to be so in both.
    """
    found_TH, right_TH = found_TH.float(), right_TH.float()
    finite_TH = torch.isfinite(right_TH)
    if not torch.equal(torch.isfinite(found_TH).all(-1), finite_TH.all(-1)):
        return float("inf")
    rows_TH = finite_TH.all(-1, keepdim=True)
    off = torch.where(rows_TH, found_TH - right_TH, 0).norm()
    return float(off / torch.where(rows_TH, right_TH, 0).norm().clamp_min(torch.finfo(torch.float32).tiny))


def graphs_for(model: FusedLoraModel, caches: Caches) -> DecodeGraphs | None:
    """Returns the records of a sampler with these caches, if its device and its model have such passes."""
    recorder = recorder_for(model.device)
    has_fixed_passes = model.pool.can_be_recorded and not model.is_sharded and not _looks_at_positions(model)
    if recorder is None or not has_fixed_passes or not isinstance(caches, PagedCaches):
        return None
    return DecodeGraphs(model, caches.pool, recorder)


def _looks_at_positions(model: FusedLoraModel) -> bool:
    """Whether its rotary embeddings hang on how far the longest sequence is, which the host asks the device."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)]
    return any(each.get("rope_type") in ("dynamic", "longrope") for each in (parameters, *by_layer))


def _nothing() -> None:
    return None


def _padded(number: int) -> int:
    return 1 << (number - 1).bit_length()
