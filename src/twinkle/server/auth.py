"""Whose request it is: the API key, looked up by its SHA-256 and remembered for a moment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable, Unauthenticated
from twinkle.core.ids import API_KEY_PREFIX
from twinkle.server.threads import Threads
from twinkle.storage.directory import Directory, digest_of_key

_HIT_TTL_S = 30.0
_MISS_TTL_S = 2.0
# While the database is away a key that was right goes on being right for this long.
_STALE_TTL_S = 600.0
_MAX_KEY_LENGTH = 512
_MAX_REMEMBERED = 20_000

_log = structlog.get_logger()


@dataclass(frozen=True)
class _Remembered:
    tenant: str | None
    looked_at: float

    def is_fresh(self, now: float) -> bool:
        return now - self.looked_at < (_HIT_TTL_S if self.tenant else _MISS_TTL_S)


class Keys:
    """Opens accounts. What it knows is at most half a minute old, so a revoked key ends by then."""

    def __init__(self, directory: Directory, clock: Clock, threads: Threads) -> None:
        self._directory = directory
        self._clock = clock
        self._threads = threads
        self._remembered: dict[str, _Remembered] = {}
        self._lookups: dict[str, asyncio.Task[str | None]] = {}

    async def tenant_of(self, key: str | None) -> str:
        """The tenant a key opens.

        Raises:
            Unauthenticated: The key is missing, malformed or unknown.
        """
        if not key:
            raise Unauthenticated("send an API key in the X-API-Key header")
        if not key.startswith(API_KEY_PREFIX) or len(key) > _MAX_KEY_LENGTH:
            raise Unauthenticated(f"not an API key of this server: its keys start with {API_KEY_PREFIX}")
        digest = digest_of_key(key)
        remembered = self._remembered.get(digest)
        if remembered is not None and remembered.is_fresh(self._clock.now()):
            tenant = remembered.tenant
        else:
            tenant = await self._look_up(key, digest)
        if tenant is None:
            raise Unauthenticated("unknown API key")
        return tenant

    def forget(self, key: str) -> None:
        """Ask about a key again: it was revoked just now."""
        self._remembered.pop(digest_of_key(key), None)

    async def _look_up(self, key: str, digest: str) -> str | None:
        """One query however many requests bring the same key at once."""
        task = self._lookups.get(digest)
        if task is None:
            task = asyncio.create_task(self._ask(key, digest))
            self._lookups[digest] = task
            task.add_done_callback(lambda _: self._lookups.pop(digest, None))
        return await asyncio.shield(task)

    async def _ask(self, key: str, digest: str) -> str | None:
        now = self._clock.now()
        try:
            tenant = await self._threads.run(self._directory.tenant_of, key)
        except StorageUnavailable as error:
            known = self._remembered.get(digest)
            if known is None or known.tenant is None or now - known.looked_at > _STALE_TTL_S:
                raise
            _log.warning("auth.stale", error=error.message, next="the last known answer holds for now")
            return known.tenant
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered = {d: known for d, known in self._remembered.items() if known.is_fresh(now)}
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
        self._remembered[digest] = _Remembered(tenant, now)
        return tenant
