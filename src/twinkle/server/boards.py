"""What the API knows of meshes and queues, at most a second old: thousands of polls ask, one look a second answers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

from twinkle.core.clock import Clock
from twinkle.core.standing import Standing, WaitReason
from twinkle.scheduler.standing import Line, describe, line_up, standing_of
from twinkle.server.threads import Threads
from twinkle.storage.journal.meshes import DEFAULT_SILENT_S, Meshes, MeshStatus
from twinkle.storage.journal.queues import Queues, Stall
from twinkle.wire.bodies.futures import PendingResponse, QueueState


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


_TTL_S = 1.0
_QUEUE_STATES: dict[WaitReason, QueueState] = {
    WaitReason.MESH_UNAVAILABLE: "paused_capacity",
    WaitReason.RATE_LIMITED: "paused_rate_limit",
}


@dataclass(frozen=True)
class _Seen:
    line: Line
    looked_at: float


class QueueBoard:
    """Tells where operations stand."""

    def __init__(self, queues: Queues, meshes: MeshBoard, clock: Clock, threads: Threads, *, max_attempts: int) -> None:
        self._queues = queues
        self._meshes = meshes
        self._clock = clock
        self._threads = threads
        self._max_attempts = max_attempts
        self._seen: dict[str, _Seen] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._stalls: list[Stall] = []
        self._stalls_at = float("-inf")
        self._stalls_lock = asyncio.Lock()

    async def standing(self, request_id: str, tenant: str) -> Standing:
        """Where one of the tenant's operations stands.

        Raises:
            NotFound: There is no such future, or it is another tenant's.
        """
        operation = await self._threads.run(self._queues.place, request_id, tenant)
        mesh = await self._meshes.find(operation.mesh)
        return standing_of(
            operation,
            await self._line(operation.mesh, with_accepted_at=operation.accepted_at),
            is_mesh_alive=mesh is not None and mesh.alive,
            now=self._clock.now(),
            max_attempts=self._max_attempts,
        )

    async def pending(self, request_id: str, tenant: str) -> PendingResponse:
        """The answer to a poll that ends without an outcome; raises as :meth:`standing` does."""
        standing = await self.standing(request_id, tenant)
        return PendingResponse(
            queue_state=_QUEUE_STATES.get(standing.reason, "active"),
            queue_state_reason=describe(standing, now=self._clock.now()),
        )

    async def stalls(self, *, after_s: float) -> list[Stall]:
        """Meshes whose work does not move, at most a second old."""
        async with self._stalls_lock:
            if self._clock.now() - self._stalls_at > _TTL_S:
                self._stalls = await self._threads.run(partial(self._queues.stalls, after_s=after_s))
                self._stalls_at = self._clock.now()
            return self._stalls

    async def _line(self, mesh: str, *, with_accepted_at: float) -> Line:
        """The line of a mesh, looked at again for what was accepted since."""
        async with self._locks[mesh]:
            seen, now = self._seen.get(mesh), self._clock.now()
            if seen is None or now - seen.looked_at > _TTL_S or seen.looked_at <= with_accepted_at:
                line = await self._threads.run(self._look, mesh)
                seen = self._seen[mesh] = _Seen(line, now)
            return seen.line

    def _look(self, mesh: str) -> Line:
        return line_up(self._queues.look(mesh))
