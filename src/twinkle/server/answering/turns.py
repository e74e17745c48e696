"""Large writes take turns: one piece of one answer each time the event loop comes round, and small requests in between.

The kernel takes megabytes for a client that does not read. Two hundred answers that begin at once would otherwise all
be written before the loop looks again at who else asks.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.types import Message, Scope, Send

PIECE_BYTES = 256 * 2**10
_SMALL_BYTES = 16 * 2**10
_SCOPE_KEY = "twinkle.flow"


class Flow(Protocol):
    """Of a connection: whether what was written has left."""

    write_paused: bool

    async def drain(self) -> None:
        """Wait until it has, or never will."""


def name_flow(scope: Scope, flow: Flow) -> None:
    """Say how the answer to a request leaves; without, its writes take turns only."""
    scope[_SCOPE_KEY] = flow


class Turns:
    """Who writes much waits for its turn, in the order of asking. Lives on one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.num_taken = 0
        """How many there were."""

    async def take(self) -> None:
        """Wait for one: the loop has come round since the one before."""
        async with self._lock:
            await asyncio.sleep(0)
            self.num_taken += 1

    def writing(self, scope: Scope, send: Send) -> Send:
        """``send`` of one request, its large bodies cut into pieces that each leave in a turn."""

        async def send_in_turn(message: Message) -> None:
            body: bytes = message.get("body", b"")
            if len(body) <= _SMALL_BYTES:
                await send(message)
                return
            for start in range(0, len(body), PIECE_BYTES):
                await self._take_when_read(scope.get(_SCOPE_KEY))
                more = message.get("more_body", False) or start + PIECE_BYTES < len(body)
                await send({**message, "body": body[start : start + PIECE_BYTES], "more_body": more})

        return send_in_turn

    async def _take_when_read(self, flow: Flow | None) -> None:
        await self.take()
        while flow is not None and flow.write_paused:
            # Whoever does not read stands in no line.
            await flow.drain()
            await self.take()
