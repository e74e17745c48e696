"""The continuous-batching sampler: many requests, many adapters, one packed pass per step.

A state machine that its owner steps, so that sampling and training take turns on one device. Every step packs one token
of each running continuation and a few chunks of prompts into one row, runs the model once, and chooses tokens. Nothing
a request gets depends on its company: attention and LoRA work sequence by sequence, prompts are cut at fixed positions,
and randomness is addressed by (seed, sample, position). Where the model's matrix products have independent rows (see
``twinkle.model.fused.determinism``) tokens and logprobs are therefore the same bits alone or in any batch.

Shape suffixes: T packed tokens, N rows that need logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import torch

from twinkle.checkpoint_engine.peft import import_adapter
from twinkle.core.errors import ConfigError, Conflict, InvalidInput, OutOfMemory
from twinkle.infra.sending import send
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.pictures import PictureLayout
from twinkle.module.lora import LoraAdapter, Segment
from twinkle.module.recurrence import CHUNK_TOKENS
from twinkle.sampler.cache_kinds import caches_for
from twinkle.sampler.caches import Caches
from twinkle.sampler.passes import PackedPasses
from twinkle.sampler.places import most_of_group, with_guests
from twinkle.sampler.planning import CacheBudget, Work, plan_pass, segments_of, slots_within
from twinkle.sampler.prefixes import PrefixCache, PromptChunk
from twinkle.sampler.progress import Continuation, RequestProgress
from twinkle.sampler.request import AdapterFiles, DecodeText, SampleRequest, check_request, not_finite
from twinkle.sampler.sequence import Stretch
from twinkle.sampler.stepped import Outcome, SteppedSampler
from twinkle.sampler.stops import stop_rule
from twinkle.sampler.unread import DrawnBatch

DEFAULT_TOKENS_PER_SLOT = 1024
DEFAULT_CHUNK_TOKENS = 256
DEFAULT_KEPT_BYTES = 512 * 2**20
DEFAULT_STATE_BYTES = 4 * 2**30
LONGEST_HELD_BACK_STEPS = 256


class SteppedTorchSampler(SteppedSampler):
    """Samples with the model that trains, on its very weights.

    Args:
        model: Base model and adapters.
        slots: Sequences (running continuations and prompts under way) of one group served at once; further ones wait in
            order. A quarter more is there for others, so that no group waits until another's sequences end.
        max_length: Prompt and output together; the model's context if omitted.
        kv_tokens: Tokens that the caches of all sequences may hold together.
        prefill_tokens_per_step: About how many prompt tokens a step computes, so that decoding never stalls for long.
        chunk_tokens: Where prompts are cut. Results are the same bits only for the same value.
        kept_bytes: Memory for computed prompts, beside the caches of running sequences: several chunks' worth, or 0.
        state_bytes: Memory for what layers that carry a state remember of running sequences; as many slots are left out
            as it has no room for.
        reads_behind: Whether tokens are read while the device computes the next ones, so that an end is found out one
            step late and the token after it dropped; by default on an accelerator. Results are the same.
        decode_text: The tokenizer's decode, needed for stop strings.
        caches: Where keys and values are kept; by default as the device has kernels for it.
        graphs: Whether passes that only decode are recorded, where the device and the model allow it.
    """

    def __init__(
        self,
        model: FusedLoraModel,
        *,
        slots: int,
        max_length: int | None = None,
        kv_tokens: int | None = None,
        prefill_tokens_per_step: int = 2 * DEFAULT_CHUNK_TOKENS,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        kept_bytes: int = DEFAULT_KEPT_BYTES,
        state_bytes: int = DEFAULT_STATE_BYTES,
        reads_behind: bool | None = None,
        decode_text: DecodeText | None = None,
        caches: Caches | None = None,
        graphs: bool = True,
    ) -> None:
        self._reads_behind = model.device.type != "cpu" if reads_behind is None else reads_behind
        self._unread: list[DrawnBatch] = []
        self._decode_text = decode_text
        context = model.info.max_context_length
        self._model = model
        self._places = slots_within(state_bytes, with_guests(slots), model)
        self._slots = min(slots, self._places)
        self._max_length = context if max_length is None else min(max_length, context)
        if kv_tokens is None:
            kv_tokens = max(self._slots * DEFAULT_TOKENS_PER_SLOT, self._max_length + DEFAULT_TOKENS_PER_SLOT)
        self._caches = caches_for(model) if caches is None else caches
        self._budget = CacheBudget(num_tokens=kv_tokens, max_length=self._max_length, caches=self._caches)
        # Made first, as it gives way before the pool does, in which a page is its own.
        self._passes = PackedPasses(model, self._caches, graphs=graphs)
        self._caches.live_in(model.memory, num_blocks=self._budget.num_blocks, kept_bytes=kept_bytes)
        self._prefill_tokens = prefill_tokens_per_step
        self._chunk_tokens = chunk_tokens
        if model.remembers and chunk_tokens % CHUNK_TOKENS:
            raise ConfigError(
                f"chunk_tokens is {chunk_tokens}; for layers that carry a state it must be a multiple of {CHUNK_TOKENS}"
            )
        self._keeps_prompts = kept_bytes > 0
        self._prefixes = PrefixCache(kept_bytes, model.memory, self._caches)
        self._waiting: deque[RequestProgress] = deque()
        self._active: list[RequestProgress] = []  # in order of arrival: the older one has the right to memory
        model.memory.add("sampled sequences", self)

    @property
    def has_work(self) -> bool:
        """See :class:`SteppedSampler`."""
        return bool(self._waiting or self._active)

    @property
    def size_bytes(self) -> int:
        """What the sequences under way hold of the device's memory."""
        return self._caches.size_bytes([cache for progress in self._active for cache in progress.caches])

    @property
    def num_requests(self) -> int:
        """See :class:`SteppedSampler`."""
        return len(self._waiting) + len(self._active)

    def add(self, request: SampleRequest) -> None:
        """See :class:`SteppedSampler`."""
        if isinstance(request.adapter, AdapterFiles):
            raise InvalidInput("adapter", "is files; load it into this sampler's model with load_adapter first")
        check_request(
            request,
            vocab_size=self._model.info.vocab_size,
            max_length=self._max_length,
            can_decode=self._decode_text is not None,
            picture_rules=self._model.picture_rules,
        )
        if any(progress.request.key == request.key for progress in (*self._waiting, *self._active)):
            raise Conflict(f"sample request {request.key} is already under way", key=request.key)
        stop = stop_rule(request, eos_token_ids=self._model.info.eos_token_ids, decode_text=self._decode_text)
        self._waiting.append(
            RequestProgress(
                request,
                stop,
                max_length=self._max_length,
                vocab_size=self._model.info.vocab_size,
                chunk_tokens=self._chunk_tokens,
                layout=self._layout(request),
                barred=() if self._model.picture_rules is None else self._model.picture_rules.all_tokens,
            )
        )

    def _layout(self, request: SampleRequest) -> PictureLayout | None:
        """The prompt's pictures, computed; raises ``InvalidInput`` for one that cannot be decoded."""
        encoder = self._model.pictures
        return None if encoder is None else encoder.layout(len(request.prompt), request.pictures)

    def cancel(self, key: str) -> None:
        """See :class:`SteppedSampler`."""
        self._waiting = deque(progress for progress in self._waiting if progress.request.key != key)
        for progress in self._active:
            if progress.request.key == key:
                progress.release()
        self._active = [progress for progress in self._active if progress.request.key != key]

    def load_adapter(self, files: Mapping[str, bytes]) -> LoraAdapter:
        """See :class:`SteppedSampler`."""
        return import_adapter(self._model.pool, files, with_optimizer=False, trainable=False)

    def forget_prompts(self) -> None:
        """See :class:`SteppedSampler`."""
        self._prefixes.clear()

    def weight_names(self) -> list[str]:
        """See :class:`SteppedSampler`."""
        return list(self._model.base_weights())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :class:`SteppedSampler`."""
        if self.num_requests:
            raise RuntimeError(f"{self.num_requests} requests are under way; wait for them before changing weights")
        self._model.load_base_weights(weights)
        self._prefixes.clear()

    def shutdown(self) -> None:
        """See :class:`SteppedSampler`."""
        for progress in (*self._waiting, *self._active):
            self.cancel(progress.request.key)
        self._unread.clear()
        self._prefixes.clear()
        self._passes.close()

    def drawn_so_far(self, key: str, known: Sequence[int]) -> list[Stretch]:
        """See :class:`SteppedSampler`."""
        found = (progress for progress in self._active if progress.request.key == key)
        return [stretch for progress in found for stretch in progress.drawn_so_far(known)]

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Runs one packed pass over everything active; returns the requests that ended with it, each in its own way.

        Raises:
            OutOfMemory: The device has no room for the pass. No sequence has moved: cancel something, or step again.
        """
        failures: dict[str, Exception] = {}
        self._start_prompts()
        for progress in self._active:
            if progress.is_prefilling:
                self._take_known(progress)
        works = plan_pass(
            self._active,
            self._budget,
            prefill_tokens=self._prefill_tokens,
            keeps_prompts=self._keeps_prompts,
            one_chunk_each=self._model.remembers,
        )
        fresh: list[DrawnBatch] = []
        if works:
            try:
                fresh = self._run_pass(works, failures)
            except torch.OutOfMemoryError as error:
                self._prefixes.clear()
                self._model.give_back_memory()
                raise OutOfMemory(f"a sampling pass over {len(works)} sequences did not fit the device") from error
        # Where tokens are read behind, the device has its next work before the host waits for what came before.
        due, self._unread = (self._unread, fresh) if self._reads_behind else (fresh, [])
        self._read(due, failures)
        for batch in self._unread:
            batch.hand_out()
        self._unread += self._start_continuations()
        if not self._reads_behind:
            self._read(self._unread, failures)
        return self._collect(failures)

    def _start_prompts(self) -> None:
        """Gives prompts a slot and memory, the oldest first; the first that does not fit holds back those behind it.

        Those of its own group, that is; the others only when it has waited for long.
        """
        held_back: set[str] = set()
        idle = [progress for progress in self._active if progress.waiting and progress.prompt_cache is None]
        for progress in (*idle, *self._waiting):
            if progress.group in held_back or self._start_prompt(progress):
                continue
            held_back.add(progress.group)
            progress.num_steps_held_back += 1
            if progress.num_steps_held_back > LONGEST_HELD_BACK_STEPS:
                return

    def _start_prompt(self, progress: RequestProgress) -> bool:
        num_tokens = len(progress.request.prompt)
        # A spare block for each running sequence: what starts now should not have to give way at once.
        spare = sum(len(other.running) for other in self._active)
        if self._free_slots(progress.group) <= 0:
            return False
        fits = self._budget.fits(self._budget.blocks_for(num_tokens) + spare, self._active)
        if not fits and not self._budget.make_room(num_tokens, self._active, group=progress.group):
            return False
        cache = self._caches.new()
        cache.make_room(0, num_tokens)
        progress.start_prompt(cache)
        progress.num_steps_held_back = 0
        if progress in self._waiting:
            # Its slot and its memory count from now on.
            self._waiting.remove(progress)
            self._active.append(progress)
        return True

    def _take_known(self, progress: RequestProgress) -> None:
        """Takes over what is known of a prompt from its next chunk on."""
        for chunk in progress.chunks_left:
            computed = self._prefixes.find(chunk) if progress.may_take(chunk) else None
            if computed is None or (computed.next_logits is None and chunk.end == len(progress.request.prompt)):
                return
            progress.take(chunk, computed)
        self._prefixes.touch(progress.chunks)

    def _keep(self, progress: RequestProgress, chunk: PromptChunk) -> None:
        """Keeps what was computed of a prompt, the rest of which follows if it is not the last."""
        known = self._prefixes.find(chunk)
        is_last = chunk.end == len(progress.request.prompt)
        if known is None or (known.next_logits is None and is_last):
            self._prefixes.keep(chunk, progress.computed(chunk))
        if is_last:
            self._prefixes.touch(progress.chunks)

    def _free_slots(self, group: str) -> int:
        """How many more sequences a group may have: a part of what others leave is always left to somebody else."""
        own = sum(progress.num_slots for progress in self._active if progress.group == group)
        others = sum(progress.num_slots for progress in self._active if progress.group != group)
        return most_of_group(slots=self._slots, places=self._places, others=others) - own

    def _run_pass(self, works: list[Work], failures: dict[str, Exception]) -> list[DrawnBatch]:
        """What is drawn from its logits."""
        fresh: list[DrawnBatch] = []
        hidden_TH, remember = self._passes.run(works)
        ends = list(accumulate(work.piece.num_tokens for work in works))
        for work, end in zip(works, ends, strict=True):
            if work.continuation is None:
                self._score_prompt(work, hidden_TH[end - work.piece.num_tokens : end], failures)
        choosing = [(work, end - 1) for work, end in zip(works, ends, strict=True) if work.needs_logits]
        if choosing:
            rows = [last for _, last in choosing]
            rows_NH = hidden_TH if len(rows) == len(hidden_TH) else self._rows(hidden_TH, rows)
            segments = segments_of([(work.progress.adapter, 1) for work, _ in choosing])
            logits_NV = self._model.logits(rows_NH, segments)
            fresh = self._take_logits([work for work, _ in choosing], logits_NV)
        # Nothing that could fail lies between a token that is appended and a state that is taken over.
        remember()
        for progress, chunk in [(work.progress, work.chunk) for work in works if work.chunk is not None]:
            progress.count_chunk()
            if self._keeps_prompts:
                self._keep(progress, chunk)
        return fresh

    def _score_prompt(self, work: Work, hidden_TH: torch.Tensor, failures: dict[str, Exception]) -> None:
        request = work.progress.request

        def logits_of(rows: slice) -> torch.Tensor:
            rows_NH = hidden_TH[rows]
            return self._model.logits(rows_NH, [Segment(work.progress.adapter, 0, rows_NH.shape[0])])

        if not work.progress.scores.score(work.piece.start, work.piece.num_tokens, logits_of):
            failures[request.key] = not_finite(request)

    def _take_logits(self, works: list[Work], logits_NV: torch.Tensor) -> list[DrawnBatch]:
        fresh: list[DrawnBatch] = []
        next_logits = [
            (work.progress, logits_NV[row].clone()) for row, work in enumerate(works) if work.continuation is None
        ]
        running = [(row, work) for row, work in enumerate(works) if work.continuation is not None]
        if running:
            rows_NV = logits_NV if len(running) == len(works) else self._rows(logits_NV, [row for row, _ in running])
            targets = [(work.progress, work.continuation) for _, work in running if work.continuation is not None]
            fresh.append(DrawnBatch.start(targets, rows_NV))
        for progress, logits_V in next_logits:
            progress.next_logits_V = logits_V
        return fresh

    def _rows(self, matrix: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return matrix.index_select(0, send(rows, torch.int64, self._model.device))

    def _start_continuations(self) -> list[DrawnBatch]:
        """Starts samples whose prompt is computed, as far as slots and memory go, and draws their first tokens."""
        started: list[tuple[RequestProgress, Continuation]] = []
        rows: list[torch.Tensor] = []
        for progress in self._active:
            if progress.next_logits_V is not None and progress.max_tokens == 0:
                progress.finish_without_tokens()
            while progress.next_logits_V is not None and self._free_slots(progress.group) > 0:
                logits_V = progress.next_logits_V
                fits = self._budget.fits(progress.num_blocks_to_fork, self._active)
                keep_prompt = len(progress.waiting) > 1 and fits
                if len(progress.waiting) > 1 and not fits and progress.running:
                    break
                started.append((progress, progress.start_continuation(keep_prompt=keep_prompt)))
                rows.append(logits_V)
        if not started:
            return []
        batch = DrawnBatch.start(started, torch.stack(rows))
        batch.hand_out()
        return [batch]

    def _read(self, batches: Sequence[DrawnBatch], failures: dict[str, Exception]) -> None:
        """Takes in what was drawn; ends the continuations that it completes."""
        for batch in batches:
            for progress, continuation, drawn in batch.read(self._active):
                if drawn is None:
                    failures[progress.request.key] = not_finite(progress.request)
                    continue
                continuation.append(drawn)
                self._end_if_complete(progress, continuation, failures)

    def _end_if_complete(
        self, progress: RequestProgress, continuation: Continuation, failures: dict[str, Exception]
    ) -> None:
        try:
            stopped = progress.stop.matches(continuation.tokens)
        except Exception as error:  # noqa: BLE001 - the tokenizer is not ours; its failure is this request's alone
            failures[progress.request.key] = error
            return
        if stopped:
            progress.finish(continuation, "stop")
        elif len(continuation.tokens) >= progress.max_tokens:
            progress.finish(continuation, "length")

    def _collect(self, failures: dict[str, Exception]) -> list[Outcome]:
        outcomes: list[Outcome] = list(failures.items())
        going_on: list[RequestProgress] = []
        for progress in self._active:
            if progress.request.key in failures:
                progress.release()
                continue
            if progress.is_done:
                outcomes.append(progress.result())
            else:
                going_on.append(progress)
        self._active = going_on
        return outcomes
