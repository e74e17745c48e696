"""What results hold of memory on their way to clients: counted against their tenant and against everybody's budget."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from fastapi import Request
from starlette.types import Scope

from twinkle.core.errors import Overloaded
from twinkle.server.body import ByteBudget, charged_of
from twinkle.server.results import PIECE_BYTES

_SCOPE_KEY = "twinkle.held_results"
_OBJECTS_PER_BYTE = 32
"""What a byte of a result takes that is read whole and written anew: eight of them are a number and its logprob, which
become objects, a text and JSON."""
_SMALL_BYTES = 4096
"""As much as the request itself takes; not counted."""

_Holds: TypeAlias = list[tuple[ByteBudget, int]]


class HeldResults:
    """Who answers with a result holds it from when it is read until the answer has left. Lives on one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.budget = ByteBudget(limit_bytes)
        self._freed = asyncio.Event()

    def watch(self, scope: Scope) -> _Holds:
        """Begin a request, whose holds :meth:`release` lets go."""
        holds: _Holds = []
        scope[_SCOPE_KEY] = holds
        return holds

    def release(self, holds: _Holds) -> None:
        """The answer has left, or never will."""
        for budget, num_bytes in holds:
            budget.give_back(num_bytes)
        if holds:
            self._freed.set()
            self._freed = asyncio.Event()

    def hold_streamed(self, request: Request, size_bytes: int) -> None:
        """Hold what is sent as it is read: a piece of it, and the next.

        Raises:
            Overloaded: Its tenant, or everybody together, holds too much; to be asked for again.
        """
        self._hold(request, min(size_bytes, 2 * PIECE_BYTES))

    async def hold_whole(self, request: Request, size_bytes: int, *, patience_s: float) -> None:
        """Hold a result that is read whole and written in another form, when there is room for it.

        Raises:
            Overloaded: There is none in all this time.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + patience_s
        while True:
            freed = self._freed
            try:
                self._hold(request, size_bytes * _OBJECTS_PER_BYTE)
                return
            except Overloaded:
                left_s = ends_at - loop.time()
                if left_s <= 0:
                    raise
                try:
                    async with asyncio.timeout(left_s):
                        await freed.wait()
                except TimeoutError:
                    continue

    def _hold(self, request: Request, num_bytes: int) -> None:
        holds: _Holds | None = request.scope.get(_SCOPE_KEY)
        if holds is None or num_bytes <= _SMALL_BYTES:
            return
        own = charged_of(request)
        taken: _Holds = []
        try:
            for budget in (self.budget, *([own] if own is not None else [])):
                # One alone always may: it was accepted, and nothing else would ever make room for it.
                budget.take(num_bytes, is_only=True)
                taken.append((budget, num_bytes))
        except Overloaded:
            for budget, held in taken:
                budget.give_back(held)
            raise
        holds.extend(taken)
