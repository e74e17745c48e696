"""What the API knows of the meshes, at most a second old."""

from __future__ import annotations

import asyncio

from twinkle.core.clock import Clock
from twinkle.server.threads import Threads
from twinkle.storage.journal.meshes import DEFAULT_SILENT_S, Meshes, MeshStatus

_TTL_S = 1.0


class MeshBoard:
    """A cache in front of :class:`Meshes`: thousands of polls ask, one query a second answers."""

    def __init__(self, meshes: Meshes, clock: Clock, threads: Threads, *, silent_s: float = DEFAULT_SILENT_S) -> None:
        self._meshes = meshes
        self._clock = clock
        self._threads = threads
        self._silent_s = silent_s
        self._known: list[MeshStatus] = []
        self._looked_at = float("-inf")
        self._lock = asyncio.Lock()

    async def all(self, *, fresh: bool = False) -> list[MeshStatus]:
        """Every mesh that ever had a worker; ``fresh`` asks the database in any case."""
        async with self._lock:
            if fresh or self._clock.now() - self._looked_at > _TTL_S:
                self._known = await self._threads.run(self._meshes.all, silent_s=self._silent_s)
                self._looked_at = self._clock.now()
            return self._known

    async def find(self, name: str) -> MeshStatus | None:
        """One mesh."""
        return next((mesh for mesh in await self.all() if mesh.name == name), None)

    async def why_waiting(self, name: str) -> str | None:
        """Why operations of a mesh do not move, in words for their owner; ``None`` when a worker is there."""
        mesh = await self.find(name)
        if mesh is not None and mesh.alive:
            return None
        return f"no worker of mesh {name!r} is running; the operation is kept and runs when one is back"
