"""Whether the object store answers: asked by anybody who likes, so it is looked at seldom, and waited for briefly."""

from __future__ import annotations

import asyncio

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.server.threads import Threads
from twinkle.storage.blobs import BlobStore

_LOOK_EVERY_S = 5.0
_PATIENCE_S = 2.0


class ObjectBoard:
    """One look at a time, whoever asks."""

    def __init__(self, blobs: BlobStore, clock: Clock, threads: Threads) -> None:
        self._blobs = blobs
        self._clock = clock
        self._threads = threads
        self._looking: asyncio.Task[bool] | None = None
        self._looked_at = float("-inf")

    async def answers(self) -> bool:
        """Whether it did when it was last looked at, or does within two seconds."""
        if self._looking is None or (self._looking.done() and self._clock.now() - self._looked_at > _LOOK_EVERY_S):
            self._looked_at = self._clock.now()
            self._looking = asyncio.create_task(self._look(), name="objects")
        try:
            return await asyncio.wait_for(asyncio.shield(self._looking), _PATIENCE_S)
        except TimeoutError:
            return False

    async def _look(self) -> bool:
        try:
            await self._threads.run(self._blobs.scan, after="", limit=1)
        except StorageUnavailable:
            return False
        return True
