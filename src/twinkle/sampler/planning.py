"""What the next pass computes: one token of every running continuation, then chunks of prompts up to a budget.

And who may hold how much cache meanwhile, and who gives way when memory is full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.model.fused.model import FusedLoraModel
from twinkle.module.lora import LoraAdapter, Segment
from twinkle.sampler.attention import CachedAttention
from twinkle.sampler.caches import Cache, Caches, Piece, blocks_for
from twinkle.sampler.kv_cache import SequenceCache
from twinkle.sampler.prefixes import PromptChunk
from twinkle.sampler.progress import Continuation, RequestProgress

STATES_PER_SLOT = 2
"""A continuation's own, and its prompt's while others are to go on from it."""

log = event_log()


@dataclass(frozen=True, eq=False)
class Work:
    """A piece of a pass and whose it is: the last token of a continuation, or a chunk of the prompt."""

    progress: RequestProgress
    continuation: Continuation | None
    chunk: PromptChunk | None
    piece: Piece[Cache]

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the piece; 0 for one that only the device knows."""
        if self.continuation is not None:
            return [0] if self.continuation.unread is not None else self.continuation.tokens[-1:]
        return self.progress.request.prompt[self.piece.start : self.end]

    @property
    def end(self) -> int:
        """The position after the piece."""
        return self.piece.end

    @property
    def needs_logits(self) -> bool:
        """Whether a token will be chosen after its last one."""
        return self.continuation is not None or self.end == len(self.progress.request.prompt)


class CacheBudget:
    """Caches grow within a budget; when it is full the newest request gives way to older ones.

    Where several groups share it, first that of a group which has more than its even part, down to its last sequence.
    Else the oldest request never gives way, and the budget holds any one sequence, so work always moves on. What was
    given up is computed again later, with the same result.
    """

    def __init__(self, *, num_tokens: int, max_length: int, caches: Caches) -> None:
        self._caches = caches
        self.num_blocks = num_tokens // caches.block_tokens
        least = self.blocks_for(max_length)
        if self.num_blocks < least:
            raise ConfigError(
                f"kv_tokens is {num_tokens}, but one sequence may grow to {max_length} tokens; "
                f"allow at least {least * caches.block_tokens}, or lower max_length"
            )

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return blocks_for(num_tokens, self._caches.block_tokens)

    def fits(self, num_blocks: int, active: list[RequestProgress]) -> bool:
        """Whether so many blocks more fit beside what ``active`` holds."""
        return num_blocks <= self.num_blocks - self._held(active)

    def grow(self, cache: Cache, start: int, end: int, active: list[RequestProgress]) -> bool:
        """Lets ``cache`` be written from ``start`` to ``end``; false if it had to be given up itself.

        Args:
            cache: Held by one of ``active``.
            start: The first position that is written.
            end: The position after the last.
            active: In order of arrival. Others of these, or ``cache`` itself, may lose caches.
        """
        # What others give up it may have alone afterwards, and then needs no copy of.
        while (missing := cache.num_missing(start, end)) > 0 and not self.fits(missing, active):
            if self._next_to_give_way(active).drop_last_cache() is cache:
                return False
        cache.make_room(start, end)
        return True

    def make_room(self, num_tokens: int, active: list[RequestProgress], *, group: str) -> bool:
        """Whether a new cache of a group fits into its even part, now that others with more than theirs gave way."""
        groups = {progress.group for progress in active if progress.holds_cache} | {group}
        own = sum(self._blocks_of(progress) for progress in active if progress.group == group)
        wanted = self.blocks_for(num_tokens)
        if len(groups) == 1 or own + wanted > self.num_blocks // len(groups):
            return False
        while not self.fits(wanted, active):
            over = [one for one in self._over_their_part(active, len(groups)) if one.group != group]
            if not over:
                return False
            over[-1].drop_last_cache()
        return True

    def _next_to_give_way(self, active: list[RequestProgress]) -> RequestProgress:
        """The newest of a group that has more than its even part, and something left without it; else the newest."""
        holders = [progress for progress in active if progress.holds_cache]
        num_groups = len({progress.group for progress in holders})
        return (self._over_their_part(active, num_groups) or holders)[-1]

    def _over_their_part(self, active: list[RequestProgress], num_groups: int) -> list[RequestProgress]:
        holders = [progress for progress in active if progress.holds_cache]
        blocks: Counter[str] = Counter()
        caches: Counter[str] = Counter()
        for progress in holders:
            blocks[progress.group] += self._blocks_of(progress)
            caches[progress.group] += len(progress.running) + (progress.prompt_cache is not None)
        part = self.num_blocks // num_groups
        return [one for one in holders if blocks[one.group] > part and caches[one.group] > 1]

    def _blocks_of(self, progress: RequestProgress) -> int:
        return self._caches.num_blocks(progress.caches)

    def _held(self, active: list[RequestProgress]) -> int:
        return self._caches.num_held(cache for progress in active for cache in progress.caches)


def plan_pass(
    active: list[RequestProgress],
    budget: CacheBudget,
    *,
    prefill_tokens: int,
    keeps_prompts: bool,
    one_chunk_each: bool = False,
) -> list[Work]:
    """Returns the work of one pass, neighbouring rows sharing an adapter.

    Grows the caches it needs; where the budget is full, newer requests lose theirs and are left out.

    Args:
        active: In order of arrival.
        budget: Of cache memory.
        prefill_tokens: No further chunk once a pass holds so many prompt tokens.
        keeps_prompts: Whether what this pass computes of prompts will be there for others.
        one_chunk_each: Whether a chunk of a prompt needs what the one before it leaves behind (layers with a memory).
    """
    works: list[Work] = []
    prefill_left = prefill_tokens
    begun: set[PromptChunk] = set()
    for progress in active:
        works += _decodes(progress, budget, active)
        if progress.is_prefilling and prefill_left > 0:
            chunks = _chunks(progress, prefill_left, begun)[: 1 if one_chunk_each else None]
            prefill_left -= sum(work.piece.num_tokens for work in chunks)
            works += chunks
            if keeps_prompts:
                begun.update(work.chunk for work in chunks if work.chunk is not None)
    order: dict[int, int] = {}
    # A stable sort: the chunks of one prompt stay in order.
    works.sort(key=lambda work: order.setdefault(id(work.progress.adapter), len(order)))
    return works


def segments_of(owners: Sequence[tuple[LoraAdapter | None, int]]) -> list[Segment]:
    """Packs runs of rows in order; neighbours with the same adapter share a segment.

    Sharing costs no bits: the rows of the model's products are independent, within an adapter as across adapters.
    """
    segments: list[Segment] = []
    end = 0
    for adapter, num_rows in owners:
        shared = bool(segments) and segments[-1].adapter is adapter
        start = segments.pop().start if shared else end
        end += num_rows
        segments.append(Segment(adapter, start, end))
    return segments


def _decodes(progress: RequestProgress, budget: CacheBudget, active: list[RequestProgress]) -> list[Work]:
    works: list[Work] = []
    for sample in sorted(progress.running):
        continuation = progress.running.get(sample)
        if continuation is None:  # it just gave way to an older sample of its own request
            continue
        if continuation.num_tokens >= progress.max_tokens:  # its last token is drawn, and yet to be read
            continue
        position = len(progress.request.prompt) + continuation.num_tokens - 1
        if budget.grow(continuation.cache, position, position + 1, active):
            works.append(Work(progress, continuation, None, Piece(continuation.cache, position, 1)))
    return works


def _chunks(progress: RequestProgress, token_budget: int, begun: set[PromptChunk]) -> list[Work]:
    """Whole chunks whatever the budget: where a prompt is cut changes the last bits.

    What an older request computes in this pass is left to it, and taken over before the next one.
    """
    assert progress.prompt_cache is not None
    works: list[Work] = []
    for chunk in progress.chunks_left:
        if token_budget <= 0 or (chunk in begun and progress.may_take(chunk)):
            break
        num_tokens = chunk.end - chunk.start
        # There is room already, but it may be part of a page that others have taken over with another chunk.
        progress.prompt_cache.make_room(chunk.start, chunk.end)
        works.append(Work(progress, None, chunk, Piece(progress.prompt_cache, chunk.start, num_tokens)))
        token_budget -= num_tokens
    return works


def block_bytes(model: FusedLoraModel) -> int:
    """What a block of a sequence's cache takes, of all layers; found out by a pass over one token."""
    cache = SequenceCache()
    cache.reserve(1)
    token = torch.zeros(1, dtype=torch.int64, device=model.device)
    attention = CachedAttention([Piece(cache, 0, 1)], model.device)
    model.run_packed(token, token, [Segment(None, 0, 1)], attention)
    return cache.size_bytes


def slots_within(limit_bytes: int, slots: int, model: FusedLoraModel) -> int:
    """As many of the slots as the states of their sequences leave room for."""
    slot_bytes = STATES_PER_SLOT * model.state_bytes
    if slot_bytes == 0 or slots * slot_bytes <= limit_bytes:
        return slots
    if slot_bytes > limit_bytes:
        raise ConfigError(
            f"the states of one sequence of {model.info.name} take {slot_bytes} bytes, more than"
            f" TWINKLE_SAMPLER_STATE_BYTES ({limit_bytes}); allow at least so many"
        )
    fitting = limit_bytes // slot_bytes
    log.warning(
        "sampler.fewer_slots",
        slots=fitting,
        wanted=slots,
        slot_bytes=slot_bytes,
        next="raise TWINKLE_SAMPLER_STATE_BYTES to sample more sequences at once",
    )
    return fitting
