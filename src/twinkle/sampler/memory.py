"""Who may hold how much cache: a budget in blocks, and who gives way when it is full."""

from __future__ import annotations

from twinkle.core.errors import ConfigError
from twinkle.sampler.kv_cache import BLOCK_TOKENS, SequenceCache, blocks_for
from twinkle.sampler.progress import RequestProgress


class CacheBudget:
    """Caches grow within a budget; when it is full the newest request gives way to older ones.

    The oldest request never gives way and the budget holds any one sequence, so work always moves on. What was given up
    is computed again later, with the same result.
    """

    def __init__(self, *, num_tokens: int, max_length: int) -> None:
        self._blocks = num_tokens // BLOCK_TOKENS
        if self._blocks < blocks_for(max_length):
            raise ConfigError(
                f"kv_tokens is {num_tokens}, but one sequence may grow to {max_length} tokens; "
                f"allow at least {blocks_for(max_length) * BLOCK_TOKENS}, or lower max_length"
            )

    def fits(self, num_tokens: int, active: list[RequestProgress], *, spare_blocks: int = 0) -> bool:
        """Whether a new cache of ``num_tokens`` fits beside what ``active`` holds."""
        return blocks_for(num_tokens) + spare_blocks <= self._blocks - _held(active)

    def grow(self, cache: SequenceCache, num_tokens: int, active: list[RequestProgress]) -> bool:
        """Grows ``cache`` to hold ``num_tokens``; false if it had to be given up itself.

        Args:
            cache: Held by one of ``active``.
            num_tokens: In all.
            active: In order of arrival. Others of these, or ``cache`` itself, may lose caches.
        """
        missing = blocks_for(num_tokens) - cache.blocks
        while missing > 0 and _held(active) + missing > self._blocks:
            newest = next(progress for progress in reversed(active) if progress.holds_cache)
            if newest.drop_last_cache() is cache:
                return False
        cache.reserve(num_tokens)
        return True


def _held(active: list[RequestProgress]) -> int:
    return sum(progress.num_blocks for progress in active)
