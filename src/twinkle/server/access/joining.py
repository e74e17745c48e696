"""This process as one of those that sign alike: it says so in the journal, and runs beside no others that do not."""

from __future__ import annotations

import asyncio

import structlog

from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.process.background import say_if_it_ends
from twinkle.server.access.signing import Signer
from twinkle.server.threads import Threads
from twinkle.storage.tenants.deployment import RENEW_EVERY_S, Deployment

_log = structlog.get_logger()


class Membership:
    """Joins at the start, and says every few seconds that it is still there."""

    def __init__(self, deployment: Deployment, signer: Signer, threads: Threads) -> None:
        self._deployment = deployment
        self._fingerprint = fingerprint_of(signer)
        self._threads = threads
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Join.

        Raises:
            ConfigError: Others run with another secret.
        """
        await self._threads.run(self._deployment.join, self._fingerprint)
        self._task = asyncio.create_task(self._renew_forever(), name="membership")
        say_if_it_ends(self._task)

    async def stop(self) -> None:
        """Say no more that it is there."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self._threads.run(self._deployment.join, self._fingerprint)
            except StorageUnavailable as error:
                _log.warning("membership.not_renewed", error=error.message, next="it is tried again")
            except ConfigError as error:
                # It was silent for longer than others wait, and they have begun with another secret.
                _log.critical("membership.lost", reason=error.message, next="end this process, or the others")


def fingerprint_of(signer: Signer) -> str:
    """What tells a secret from others, and nothing else of it."""
    return signer.key_for("fingerprint").hex()[:32]
