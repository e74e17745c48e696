"""What results hold of memory on their way to clients: counted against their tenant and against everybody's budget."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fastapi import Request
from starlette.types import Scope

from twinkle.core.errors import Overloaded
from twinkle.server.answering.turns import PIECE_BYTES
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.receiving.body import ByteBudget, charged_of

_SCOPE_KEY = "twinkle.held_results"
_OBJECTS_PER_BYTE = 32
"""What a byte of a result takes that is written anew: eight of them are a number and its logprob, which become objects,
a text and JSON."""
_COPIES_PER_BYTE = 3
"""What a byte takes of which that has not been done yet, or is over: as it was read, and as arrays."""
_SMALL_BYTES = 4096
"""As much as the request itself takes; not counted."""


@dataclass
class Hold:
    """What is held for one result."""

    freed: asyncio.Event
    budgets: list[ByteBudget] = field(default_factory=list)
    num_bytes: int = 0

    def lessen(self, num_bytes: int) -> None:
        """Hold no more than so much from now on."""
        surplus = self.num_bytes - num_bytes
        if surplus <= 0:
            return
        self.num_bytes = num_bytes
        for budget in self.budgets:
            budget.give_back(surplus)
        self.freed.set()

    def write_in_parts(self, result_bytes: int, largest_part_bytes: int) -> None:
        """Of what :meth:`HeldResults.hold_whole` holds keep what one part after the other takes to be written."""
        self.lessen(_COPIES_PER_BYTE * result_bytes + _OBJECTS_PER_BYTE * largest_part_bytes)


class HeldResults:
    """Who answers with a result holds it from when it is read until the answer has left. Lives on one event loop."""

    def __init__(self, limit_bytes: int, freed: FreedMemory | None = None) -> None:
        self.budget = ByteBudget(limit_bytes, freed=freed)
        self._freed = asyncio.Event()

    def watch(self, scope: Scope) -> list[Hold]:
        """Begin a request, whose holds :meth:`release` lets go."""
        holds: list[Hold] = []
        scope[_SCOPE_KEY] = holds
        return holds

    def release(self, holds: list[Hold]) -> None:
        """The answer has left, or never will."""
        for hold in holds:
            hold.lessen(0)

    def hold_streamed(self, request: Request, size_bytes: int) -> None:
        """Hold what is sent as it is read: a piece of it, and the next.

        Raises:
            Overloaded: Its tenant, or everybody together, holds too much; to be asked for again.
        """
        self._hold(request, min(size_bytes, 2 * PIECE_BYTES))

    async def hold_whole(self, request: Request, size_bytes: int, *, patience_s: float) -> Hold:
        """Hold a result that is read whole and written in another form, when there is room for it.

        Raises:
            Overloaded: There is none in all this time.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + patience_s
        while True:
            self._freed.clear()
            try:
                return self._hold(request, size_bytes * _OBJECTS_PER_BYTE)
            except Overloaded:
                left_s = ends_at - loop.time()
                if left_s <= 0:
                    raise
                try:
                    async with asyncio.timeout(left_s):
                        await self._freed.wait()
                except TimeoutError:
                    continue

    def _hold(self, request: Request, num_bytes: int) -> Hold:
        hold = Hold(self._freed)
        holds: list[Hold] | None = request.scope.get(_SCOPE_KEY)
        if holds is None or num_bytes <= _SMALL_BYTES:
            return hold
        own = charged_of(request)
        try:
            for budget in (self.budget, *([own] if own is not None else [])):
                # One alone always may: it was accepted, and nothing else would ever make room for it.
                budget.take(num_bytes, is_only=True)
                hold.budgets.append(budget)
        except Overloaded:
            for budget in hold.budgets:
                budget.give_back(num_bytes)
            raise
        hold.num_bytes = num_bytes
        holds.append(hold)
        return hold
