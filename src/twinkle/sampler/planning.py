"""What the next pass computes: one token of every running continuation, then chunks of prompts up to a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.sampler.attention import Piece
from twinkle.sampler.memory import CacheBudget
from twinkle.sampler.progress import Continuation, RequestProgress


@dataclass(frozen=True, eq=False)
class Work:
    """A piece of a pass and whose it is; without a continuation it is a chunk of the prompt."""

    progress: RequestProgress
    continuation: Continuation | None
    piece: Piece

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the piece."""
        if self.continuation is not None:
            return self.continuation.tokens[-1:]
        return self.progress.request.prompt[self.piece.start : self.end]

    @property
    def end(self) -> int:
        """The position after the piece."""
        return self.piece.start + self.piece.num_tokens

    @property
    def needs_logits(self) -> bool:
        """Whether a token will be chosen after its last one."""
        return self.continuation is not None or self.end == len(self.progress.request.prompt)


def plan_pass(
    active: list[RequestProgress], budget: CacheBudget, *, prefill_tokens: int, chunk_tokens: int
) -> list[Work]:
    """Returns the work of one pass, neighbouring rows sharing an adapter.

    Grows the caches it needs; where the budget is full, newer requests lose theirs and are left out.

    Args:
        active: In order of arrival.
        budget: Of cache memory.
        prefill_tokens: No further chunk once a pass holds so many prompt tokens.
        chunk_tokens: Prompts are cut at multiples of it.
    """
    works: list[Work] = []
    prefill_left = prefill_tokens
    for progress in active:
        works += _decodes(progress, budget, active)
        if progress.is_prefilling and prefill_left > 0:
            chunks = _chunks(progress, prefill_left, chunk_tokens)
            prefill_left -= sum(work.piece.num_tokens for work in chunks)
            works += chunks
    order: dict[int, int] = {}
    # A stable sort: the chunks of one prompt stay in order.
    works.sort(key=lambda work: order.setdefault(id(work.progress.adapter), len(order)))
    return works


def _decodes(progress: RequestProgress, budget: CacheBudget, active: list[RequestProgress]) -> list[Work]:
    works: list[Work] = []
    for sample in sorted(progress.running):
        continuation = progress.running.get(sample)
        if continuation is None:  # it just gave way to an older sample of its own request
            continue
        position = len(progress.request.prompt) + len(continuation.tokens) - 1
        if budget.grow(continuation.cache, position + 1, active):
            works.append(Work(progress, continuation, Piece(continuation.cache, position, 1)))
    return works


def _chunks(progress: RequestProgress, token_budget: int, chunk_tokens: int) -> list[Work]:
    """Cuts at multiples of ``chunk_tokens`` whatever the budget: where the cut is changes the last bits."""
    assert progress.prompt_cache is not None
    works: list[Work] = []
    start, length = progress.num_computed, len(progress.request.prompt)
    while start < length and token_budget > 0:
        num_tokens = min(chunk_tokens, length - start)
        works.append(Work(progress, None, Piece(progress.prompt_cache, start, num_tokens)))
        start += num_tokens
        token_budget -= num_tokens
    return works
