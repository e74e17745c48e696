"""Running the datums of many jobs through one model in packed passes, and keeping one job's trouble to itself.

Shapes: T packed tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from twinkle.core.errors import OutOfMemory, UserError
from twinkle.core.process.events import event_log
from twinkle.core.slices import Slices
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.infra.sending import Parcel, fetch, send
from twinkle.loss.operation_work import TooMuchWork
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.job_run import JobRun
from twinkle.model.fused.loss_batches import batch_losses
from twinkle.model.fused.loss_head import HeadItem, LossHead
from twinkle.model.fused.pass_size import PassSize
from twinkle.model.fused.recomputation import Recomputation
from twinkle.model.fused.training import ENTROPY_WEIGHTS
from twinkle.model.pictures import PackedPictures, PictureEncoder, PictureLayout, TokenRange, pack
from twinkle.module.lora import Segment
from twinkle.module.packed_attention import CausalSpans, PackedAttention

DatumPlace = tuple[JobRun, int]
"""A datum's place in a pass: its job and its number within the job."""


class Decode(Protocol):
    """From embeddings to hidden states."""

    def __call__(
        self,
        embeddings_TH: torch.Tensor,
        positions_T: torch.Tensor,
        segments: Sequence[Segment],
        attention: PackedAttention,
        pictures: PackedPictures | None = None,
    ) -> torch.Tensor:
        """The hidden states [T, H]; positions may be [3, T], and what deepstack adds to ``pictures`` is added."""
        ...


log = event_log()

WORK_PER_PASS = 1 << 24
"""Of clients' own losses, beyond which others may go first."""


class OutOfStep(RuntimeError):
    """This rank failed where others wait for it: none of them can go on."""


class FusedStep:
    """Cuts jobs into passes of about ``tokens_per_pass`` tokens, whole datums only, and recovers from failed passes.

    How passes are cut never shows in a result: every sum over tokens is made per datum, in datum order.

    Args:
        embedding: From token ids to embeddings.
        decode: From embeddings to hidden states.
        head: From hidden states to losses and back.
        tokens_per_pass: About how many tokens a pass has.
        device: Where they are.
        ranks: All that have a share of each job.
        lockstep: Those of them that must make the same passes, since they exchange weights within ``decode``.
        encoder: What makes features of pictures; without one no datum has any.
        recomputation: Which passes keep their activations; without one all do.
        release: Gives back memory that is kept to be quick.
    """

    def __init__(
        self,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        decode: Decode,
        head: LossHead,
        *,
        tokens_per_pass: int,
        device: torch.device,
        ranks: RankGroup = ALONE,
        lockstep: RankGroup = ALONE,
        encoder: PictureEncoder | None = None,
        recomputation: Recomputation | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self._encoder = encoder
        self._recomputation = recomputation
        self._release = release
        self._embedding = embedding
        self._decode = decode
        self._head = head
        # Apart: a pass without gradients needs a fraction of the memory.
        self._sizes = {backward: PassSize(tokens_per_pass) for backward in (True, False)}
        self._times_apart = 0
        self._device = device
        self._ranks = ranks
        self._lockstep = lockstep

    def run(self, runs: Sequence[JobRun]) -> Slices[None]:
        """Bring every run to its end or to its failure, a pass at a time; as many slices on every rank."""
        for backward in (True, False):
            yield from self._run_all([run for run in runs if run.job.backward is backward], backward=backward)

    def _run_all(self, runs: Sequence[JobRun], *, backward: bool) -> Slices[None]:
        size = self._sizes[backward]
        pauses = self._pauses(runs)
        is_begun = False
        while self._lockstep.any(bool(places := _next_pass(runs, size.num_tokens))):
            if pauses is None and is_begun:
                yield
            is_begun = True
            if places:
                self._run_next(places, size, backward=backward)
            else:
                self.run_idle(backward=backward)
            while pauses and _tokens_left(runs) <= pauses[-1]:
                pauses.pop()
                yield
        for _ in pauses or ():
            yield

    def _pauses(self, runs: Sequence[JobRun]) -> list[int] | None:
        """Before how many tokens of this rank's share a slice ends, the last first; None: after every pass.

        Ranks that make passes of their own must pause equally often, and know it without asking each other.
        """
        if self._ranks.size == self._lockstep.size:
            return None
        num_tokens = sum(datum.tokens.size for run in runs for datum in run.job.data)
        num_slices = -(-num_tokens // (self._ranks.size * self._sizes[True].limit))
        own = _tokens_left(runs)
        return [own * number // num_slices for number in range(1, num_slices)]

    def _run_next(self, places: Sequence[DatumPlace], size: PassSize, *, backward: bool) -> None:
        failure = self._attempt(places, backward=backward)
        if failure is None:
            size.went_well()
            return
        involved = list(dict.fromkeys(run for run, _ in places))
        for run in involved:
            run.restart()
        if isinstance(failure, OutOfMemory):
            self._recover_memory(places, size, failure)
        elif len(involved) > 1:
            self._go_alone(involved, failure)
        else:
            involved[0].fail(failure)

    def _attempt(self, places: Sequence[DatumPlace], *, backward: bool) -> Exception | None:
        try:
            self._run_pass(places, backward=backward)
        except OutOfStep:
            raise
        except Exception as error:  # noqa: BLE001 - whatever one datum provokes must not reach its neighbours
            if is_out_of_memory(error):
                return OutOfMemory(f"the device ran out of memory: {error}")
            # The frames of the failed pass hold its activations.
            return error.with_traceback(None)
        return None

    def _recover_memory(self, places: Sequence[DatumPlace], size: PassSize, failure: OutOfMemory) -> None:
        self._release()
        num_tokens = sum(run.job.data[index].tokens.size for run, index in places)
        if len(places) > 1:
            size.shrink(num_tokens)
        elif not (places[0][0].job.backward and self._recomputation and self._recomputation.did_not_fit(num_tokens)):
            places[0][0].fail(failure)

    def _go_alone(self, involved: Sequence[JobRun], failure: Exception) -> None:
        """One of these jobs is at fault: let each go alone, so that only the guilty one fails."""
        self._times_apart += 1
        log.warning(
            "model.pass.failed_fused",
            error=f"{type(failure).__name__}: {failure}",
            num_jobs=len(involved),
            next="each goes alone",
            times=self._times_apart,
        )
        for run in involved:
            run.alone = True

    def run_idle(self, *, backward: bool) -> None:
        """Make a pass over one token for nobody, beside ranks that have datums left."""
        with self._in_step():
            hidden_TH = self._forward([np.zeros(1, dtype=np.int64)], [None], [], [(0, 1)], backward=backward)
        self._backward(hidden_TH, torch.zeros_like(hidden_TH) if backward else None)

    def _run_pass(self, places: Sequence[DatumPlace], *, backward: bool) -> None:
        layouts = self._layouts(places)
        if layouts is None:
            if self._lockstep.size > 1:
                self.run_idle(backward=backward)
            return
        data = [run.job.data[index] for run, index in places]
        ends = np.cumsum([datum.tokens.size for datum in data]).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        segments = [
            Segment(run.job.adapter, start, end, run.gradient)
            for (run, _), (start, end) in zip(places, spans, strict=True)
        ]
        with self._in_step():
            hidden_TH = self._forward([datum.tokens for datum in data], layouts, segments, spans, backward=backward)
            d_hidden_TH = torch.zeros_like(hidden_TH, requires_grad=False) if backward else None
        try:
            targets_T, items = self._head_items(places, spans)
            self._head.run(hidden_TH.detach(), targets_T, items, d_hidden_TH)
        except Exception:
            if self._lockstep.size > 1:
                self._backward(hidden_TH, None if d_hidden_TH is None else d_hidden_TH.zero_())
            raise
        self._backward(hidden_TH, d_hidden_TH)
        self._record(places, items)

    @staticmethod
    def _record(places: Sequence[DatumPlace], items: Sequence[HeadItem]) -> None:
        """Take what came out of a pass to the host, all of it at once."""
        batches = list(dict.fromkeys(item.batch for item in items))
        tensors = [each for batch in batches for each in batch.results]
        entropies = [(item, torch.cat(item.entropies)) for item in items if item.entropies]
        found = iter(fetch([*tensors, *(values for _, values in entropies)]))
        results = {batch: batch.read(found) for batch in batches if batch.failure is None}
        entropies_of = {item: next(found) for item, _ in entropies}
        for (run, index), item in zip(places, items, strict=True):
            failure = item.batch.failure
            if isinstance(failure, TooMuchWork):
                run.fail(failure)
            elif failure is not None:
                run.fail(UserError(f"data[{index}]: {failure.message}"))
            elif run.failure is None:
                result = results[item.batch].of_datum(item.offset, item.offset + item.end - item.start)
                run.record(*result, entropies_of.get(item), work=item.batch.spent)
        for run in dict.fromkeys(run for run, _ in places):
            run.judge_work()

    def _layouts(self, places: Sequence[DatumPlace]) -> list[PictureLayout | None] | None:
        """Where the pictures of each datum lie, their features computed; None if a picture has ended its job.

        The pass is then made up anew, of the others: nothing was computed yet.
        """
        layouts: list[PictureLayout | None] = []
        for run, index in places:
            datum = run.job.data[index]
            if self._encoder is None or not datum.pictures:
                layouts.append(None)
                continue
            try:
                with self._in_step():
                    layouts.append(self._encoder.layout(datum.tokens.size, datum.pictures))
            except UserError as error:
                run.fail(UserError(f"data[{index}].model_input: {error.message}"))
        return layouts if len(layouts) == len(places) else None

    def _forward(
        self,
        tokens: Sequence[np.ndarray],
        layouts: Sequence[PictureLayout | None],
        segments: Sequence[Segment],
        spans: Sequence[tuple[int, int]],
        *,
        backward: bool,
    ) -> torch.Tensor:
        tokens_T = self._tensor(np.concatenate(tokens), torch.int64)
        ranges = [TokenRange(0, part.size, layout) for part, layout in zip(tokens, layouts, strict=True)]
        positions_T, pictures = pack(ranges, self._device)
        with torch.set_grad_enabled(backward):
            embeddings_TH = self._embedding(tokens_T).detach()
            if pictures is not None:
                embeddings_TH = pictures.fill(embeddings_TH)
            if backward:
                embeddings_TH.requires_grad_(True)
            return self._decode(embeddings_TH, positions_T, segments, CausalSpans(spans), pictures)

    def _backward(self, hidden_TH: torch.Tensor, d_hidden_TH: torch.Tensor | None) -> None:
        if d_hidden_TH is not None:
            with self._in_step():
                hidden_TH.backward(d_hidden_TH)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Weights are exchanged within: a rank that fails here has left the others waiting."""
        try:
            yield
        except Exception as error:
            if self._lockstep.size == 1 or isinstance(error, UserError):
                raise
            raise OutOfStep(f"a pass failed between the ranks: {error}") from error

    def _head_items(
        self, places: Sequence[DatumPlace], spans: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, list[HeadItem]]:
        """The (first) target of every token, and what else the head is told of each datum, all of it sent at once."""
        arrays = [run.job.data[index].inputs for run, index in places]
        aimed = [inputs["target_tokens"] for inputs in arrays]
        first = [targets if targets.ndim == 1 else targets[:, 0] for targets in aimed]
        size = sum(targets.shape[0] if targets.ndim == 1 else len(targets) + targets.size for targets in aimed)
        targets = Parcel(size, torch.int64, self._device)
        numbers = Parcel(sum(each.size for inputs in arrays for each in inputs.values()), torch.float32, self._device)
        targets_T = targets.put(np.concatenate(first))
        batches = batch_losses(
            [run.loss for run, _ in places],
            arrays,
            [run.work for run, _ in places],
            numbers.put,
            together=self._head.sums_together,
            longest=self._head.rows_per_group,
        )
        items = []
        for (run, _), (start, end), inputs, (batch, offset), own in zip(
            places, spans, arrays, batches, aimed, strict=True
        ):
            weighted = run.job.with_entropies and run.job.backward
            items.append(
                HeadItem(
                    start=start,
                    end=end,
                    adapter=run.job.adapter,
                    gradient=run.gradient,
                    batch=batch,
                    offset=offset,
                    candidates=targets.put(own) if own.ndim == 2 else None,
                    wants_entropies=run.job.with_entropies and not run.job.backward,
                    entropy_weights=numbers.put(inputs[ENTROPY_WEIGHTS]) if weighted else None,
                )
            )
        targets.send()
        numbers.send()
        return targets_T, items

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return send(values, dtype, self._device)


def _tokens_left(runs: Sequence[JobRun]) -> int:
    pending = (run.job.data[run.next_datum : run.share.stop] for run in runs if run.pending)
    return sum(datum.tokens.size for data in pending for datum in data)


def _next_pass(runs: Sequence[JobRun], budget: int) -> list[DatumPlace]:
    """The next datums, job after job, as many as fit the budget (at least one), clients' own losses counted too."""
    places: list[DatumPlace] = []
    num_tokens = work = 0
    for run in runs:
        if not run.pending or (run.alone and places):
            continue
        for index in range(run.next_datum, run.share.stop):
            size = run.job.data[index].tokens.size
            if places and (num_tokens + size > budget or work + run.expected_work > WORK_PER_PASS):
                return places
            places.append((run, index))
            num_tokens += size
            work += run.expected_work
        if run.alone:
            return places
    return places
