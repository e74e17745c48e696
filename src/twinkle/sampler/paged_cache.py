"""Keys and values of one sequence in pages of a pool, and what layers with a memory remember of it.

A continuation shares the pages of its prompt with others; the first token that it writes into the last of them, which
is seldom full, takes a copy of that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from twinkle.module.packed_states import LayerState
from twinkle.sampler.caches import KeptTokens, blocks_for
from twinkle.sampler.pages import Page, PagePool


@dataclass(eq=False)
class KeptPages:
    """The pages of a stretch; what else lies in them belongs to the same beginning."""

    pool: PagePool
    pages: Sequence[Page] = field(default=())

    def __post_init__(self) -> None:
        for page in self.pages:
            self.pool.keep(page)

    @property
    def size_bytes(self) -> int:
        """See :class:`KeptTokens`."""
        return len(self.pages) * self.pool.page_bytes

    def release(self) -> None:
        """See :class:`KeptTokens`."""
        pages, self.pages = self.pages, ()
        for page in pages:
            self.pool.forget(page)


class PagedCache:
    """A row of pages, the last of them partly filled."""

    def __init__(self, pool: PagePool) -> None:
        self.pages: list[Page] = []
        self.states: Mapping[int, LayerState] = {}
        self._pool = pool
        self._places: tuple[int, np.ndarray] | None = None

    @property
    def blocks(self) -> int:
        """See :class:`Cache`."""
        return len(self.pages)

    @property
    def num_blocks_to_fork(self) -> int:
        """See :class:`Cache`; the rest is shared, and where the last page is full the next token takes a new one."""
        return 1

    def num_missing(self, start: int, end: int) -> int:
        """See :class:`Cache`. A page that is kept, but read by nobody else, is replaced by its copy."""
        copied = sum(page.num_owners > 1 for page in self.pages[self._pages_of(start, end)])
        return max(0, blocks_for(end, self._pool.page_tokens) - len(self.pages)) + copied

    def make_room(self, start: int, end: int) -> None:
        """See :class:`Cache`."""
        written = self._pages_of(start, end)
        self.pages[written] = [self._pool.own_alone(page) for page in self.pages[written]]
        self.pages += [self._pool.take() for _ in range(blocks_for(end, self._pool.page_tokens) - len(self.pages))]
        self._places = None

    def keep(self, start: int, end: int) -> KeptPages:
        """See :class:`Cache`."""
        return KeptPages(self._pool, tuple(self.pages[self._pages_of(start, end)]))

    def take(self, start: int, kept: KeptTokens) -> None:
        """See :class:`Cache`."""
        assert isinstance(kept, KeptPages)
        first = start // self._pool.page_tokens
        for number, page in enumerate(kept.pages, first):
            self._pool.own(page)
            self._pool.disown(self.pages[number])
            self.pages[number] = page
        self._places = None

    def fork(self) -> PagedCache:
        """See :class:`Cache`."""
        fork = PagedCache(self._pool)
        fork.pages, fork.states = list(self.pages), self.states
        for page in self.pages:
            self._pool.own(page)
        return fork

    def release(self) -> None:
        """See :class:`Cache`."""
        pages, self.pages = self.pages, []
        for page in pages:
            self._pool.disown(page)
        self.states = {}
        self._places = None

    def places(self) -> np.ndarray:
        """Returns where its pages lie."""
        if self._places is None or self._places[0] != self._pool.epoch:
            self._places = self._pool.epoch, np.array([page.index for page in self.pages], dtype=np.int64)
        return self._places[1]

    def _pages_of(self, start: int, end: int) -> slice:
        return slice(start // self._pool.page_tokens, blocks_for(end, self._pool.page_tokens))
