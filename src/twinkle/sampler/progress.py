"""How far one request has come: its prompt, the continuations that run, those that still wait, those that are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinkle.model.pictures import PictureLayout
from twinkle.module.lora import LoraAdapter
from twinkle.sampler.caches import Cache, copies_of_states
from twinkle.sampler.drawing import Draw, DrawnRows
from twinkle.sampler.prefixes import ComputedChunk, PromptChunk, chunks_of
from twinkle.sampler.prompt_scores import PromptScores
from twinkle.sampler.request import (
    AdapterFiles,
    DrawnSequence,
    SampleRequest,
    SampleResult,
    StopReason,
    rule_of,
    seen_by,
)
from twinkle.sampler.sequence import GrowingSequence, Stretch, finished_beyond
from twinkle.sampler.stops import StopRule


@dataclass(eq=False, kw_only=True)
class Continuation(GrowingSequence):
    """One sample under way, with the keys and values of all its tokens but the last."""

    cache: Cache
    unread: tuple[DrawnRows, int] | None = None
    """Its last token, where the host has not read it yet: what was drawn at once, and its row there."""

    @property
    def num_tokens(self) -> int:
        """How many it has, the unread one included."""
        return len(self.tokens) + (self.unread is not None)

    @property
    def unread_token(self) -> torch.Tensor | None:
        """On the device [1]."""
        if self.unread is None:
            return None
        drawn, row = self.unread
        return drawn.tokens_N[row : row + 1]


class RequestProgress:
    """One admitted or waiting request.

    The prompt is computed once, into ``prompt_cache``; ``next_logits_V`` (set when it is complete) starts every
    continuation. Continuations fork the cache and the last one takes it. Whatever is dropped to make room is computed
    again later, with the same result: nothing in here is drawn from a generator. ``layout`` has the prompt's pictures.
    """

    def __init__(
        self,
        request: SampleRequest,
        stop: StopRule,
        *,
        max_length: int,
        vocab_size: int,
        chunk_tokens: int,
        layout: PictureLayout | None = None,
        barred: tuple[int, ...] = (),
    ) -> None:
        self.request = request
        self.layout = layout
        self.stop = stop
        self.rule = rule_of(request, barred)
        room = max_length - len(request.prompt)
        self.max_tokens = room if request.max_tokens is None else min(room, request.max_tokens)
        self.scores = PromptScores(request, vocab_size, barred)
        self.waiting = deque(range(request.num_samples))
        self.running: dict[int, Continuation] = {}
        self.finished: dict[int, DrawnSequence] = {}
        self.chunks = chunks_of(
            request.prompt,
            self.adapter,
            group=request.cache_group,
            chunk_tokens=chunk_tokens,
            pictures=request.pictures,
        )
        self.num_chunks_done = 0
        self.num_steps_held_back = 0
        """How often there was no place or memory for its prompt."""
        self._num_chunks_seen = 0
        self._num_cached_tokens = 0
        self.prompt_cache: Cache | None = None
        self.next_logits_V: torch.Tensor | None = None

    @property
    def adapter(self) -> LoraAdapter | None:
        """Whose weights it runs on."""
        adapter = self.request.adapter
        assert not isinstance(adapter, AdapterFiles), "refused when the request was added"
        return adapter

    @property
    def group(self) -> str:
        """With whom it shares slots and memory evenly."""
        return self.request.cache_group

    def next_draw(self, continuation: Continuation) -> Draw:
        """Returns what decides the continuation's next token."""
        return Draw(
            self.rule,
            self.request.seed,
            continuation.sample,
            continuation.num_tokens,
            self.request.topk_sample_logprobs,
            self.request.repetition_penalty,
            seen_by(self.request, continuation.tokens),
            continuation.unread_token,
        )

    @property
    def is_prefilling(self) -> bool:
        """Whether its prompt is being computed: it then holds one slot."""
        return self.prompt_cache is not None and self.next_logits_V is None

    @property
    def is_done(self) -> bool:
        """Whether every sample is finished."""
        return len(self.finished) == self.request.num_samples

    @property
    def num_slots(self) -> int:
        """Slots it holds now."""
        return len(self.running) + self.is_prefilling

    @property
    def holds_cache(self) -> bool:
        """Whether there is anything it could give up."""
        return bool(self.running) or self.prompt_cache is not None

    @property
    def caches(self) -> list[Cache]:
        """Those it holds now."""
        caches = [continuation.cache for continuation in self.running.values()]
        return caches if self.prompt_cache is None else [*caches, self.prompt_cache]

    def start_prompt(self, cache: Cache) -> None:
        """Begins to compute the prompt into ``cache``."""
        self.prompt_cache = cache
        self.num_chunks_done = 0
        self.next_logits_V = None

    @property
    def chunks_left(self) -> list[PromptChunk]:
        """What is still to be computed of the prompt."""
        return self.chunks[self.num_chunks_done :]

    def may_take(self, chunk: PromptChunk) -> bool:
        """Whether nothing is asked about the tokens of a chunk, so that it need not be computed for this request."""
        first = self.scores.first_position
        return first == len(self.request.prompt) or chunk.end < first

    def count_chunk(self) -> None:
        """Notes that one more chunk of the prompt is there."""
        self.num_chunks_done += 1
        # What it has had before it finds again because of itself: that is nobody else's computation.
        self._num_chunks_seen = max(self._num_chunks_seen, self.num_chunks_done)

    def take(self, chunk: PromptChunk, computed: ComputedChunk) -> None:
        """Goes on from what another request computed."""
        assert self.prompt_cache is not None
        self.prompt_cache.take(chunk.start, computed.tokens)
        self.prompt_cache.states = computed.states
        if self.num_chunks_done == self._num_chunks_seen:
            self._num_cached_tokens += chunk.end - chunk.start
        self.count_chunk()
        if chunk.end == len(self.request.prompt):
            self.next_logits_V = computed.next_logits

    def computed(self, chunk: PromptChunk) -> ComputedChunk:
        """Returns what the chunk that was computed last leaves behind, for others."""
        assert self.prompt_cache is not None
        tokens = self.prompt_cache.keep(chunk.start, chunk.end)
        next_logits_V = self.next_logits_V if chunk.end == len(self.request.prompt) else None
        return ComputedChunk(tokens, copies_of_states(self.prompt_cache.states), next_logits_V)

    @property
    def num_blocks_to_fork(self) -> int:
        """What another sample takes, if the prompt's cache is kept for those behind it."""
        assert self.prompt_cache is not None
        return self.prompt_cache.num_blocks_to_fork

    def start_continuation(self, *, keep_prompt: bool) -> Continuation:
        """Starts the next waiting sample on a fork of the computed prompt's cache, or on that itself."""
        assert self.prompt_cache is not None
        cache = self.prompt_cache.fork() if keep_prompt else self.prompt_cache
        if not keep_prompt:
            self._drop_prompt()
        continuation = Continuation(sample=self.waiting.popleft(), cache=cache)
        self.running[continuation.sample] = continuation
        return continuation

    def finish(self, continuation: Continuation, stop_reason: StopReason) -> None:
        """Ends a running sample."""
        del self.running[continuation.sample]
        continuation.cache.release()
        self.finished[continuation.sample] = continuation.finish(stop_reason, self.request.topk_sample_logprobs)

    def finish_without_tokens(self) -> None:
        """Ends all samples of a request that may not generate anything, once its prompt is computed."""
        while self.waiting:
            continuation = self.start_continuation(keep_prompt=len(self.waiting) > 1)
            self.finish(continuation, "length")

    def drop_last_cache(self) -> Cache:
        """Gives up the prompt's cache, else that of its last running sample, which then waits and starts anew.

        The prompt goes first: running samples are nearer to their end than those that wait for it.
        """
        if self.prompt_cache is not None:
            cache = self.prompt_cache
            self._drop_prompt()
            cache.release()
            return cache
        continuation = self.running.pop(max(self.running))
        self.waiting.appendleft(continuation.sample)
        continuation.cache.release()
        return continuation.cache

    def release(self) -> None:
        """Gives up everything: nobody waits for it any more."""
        for cache in self.caches:
            cache.release()
        self.prompt_cache = None
        self.running.clear()

    def drawn_so_far(self, known: Sequence[int]) -> list[Stretch]:
        """Returns what the samples that run or are finished have beyond what is known of them."""
        stretches = [continuation.beyond(known[sample]) for sample, continuation in self.running.items()]
        stretches += [finished_beyond(sample, done, known[sample]) for sample, done in self.finished.items()]
        return [stretch for stretch in stretches if stretch.tokens]

    def result(self) -> SampleResult:
        """Returns the finished samples in order, with the scores of the prompt."""
        sequences = tuple(self.finished[sample] for sample in range(self.request.num_samples))
        return self.scores.fill(SampleResult(self.request.key, sequences, num_cached_tokens=self._num_cached_tokens))

    def _drop_prompt(self) -> None:
        self.prompt_cache = None
        self.num_chunks_done = 0
        self.next_logits_V = None
