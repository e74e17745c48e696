"""Room on the disks: below one mark nothing new is begun, below another nothing is done but deleting and reading."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import DiskFull
from twinkle.core.settings import Settings
from twinkle.server.scopes import may_go_on, only_ends_or_reads

_LOOK_EVERY_S = 1.0

_log = structlog.get_logger()


def folders_of(settings: Settings) -> list[Path]:
    """Where the journal and the objects lie, as far as that is on disks of this machine."""
    folders = []
    if settings.resolved_database_url.startswith("sqlite:///"):
        folders.append(Path(settings.resolved_database_url.removeprefix("sqlite:///")).parent)
    store = settings.resolved_object_store
    if "://" not in store or store.startswith("file://"):
        folders.append(Path(store.removeprefix("file://")))
    return folders


def free_bytes(folder: Path) -> int:
    """What may still be written below a folder."""
    return shutil.disk_usage(folder).free


class DiskRoom:
    """Looks once a second at most."""

    def __init__(
        self,
        folders: Sequence[Path],
        clock: Clock,
        *,
        low_bytes: int,
        critical_bytes: int,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Take the marks.

        Args:
            folders: On the disks that matter.
            clock: What time it is.
            low_bytes: With less nothing new is begun; 0: never mind.
            critical_bytes: With less only what deletes or reads is done.
            free: How much there is.
        """
        self._folders = folders
        self._clock = clock
        self._low_bytes = low_bytes
        self._critical_bytes = critical_bytes
        self._free = free
        self._looked_at = float("-inf")
        self._least = 0
        self._was_low = False

    def check(self, method: str, path: str) -> None:
        """Let a request pass that there is room for.

        Raises:
            DiskFull: There is none.
        """
        if not self._low_bytes:
            return
        self._look()
        if self._least >= self._low_bytes:
            return
        if self._least < self._critical_bytes and not only_ends_or_reads(method, path):
            raise DiskFull("the server has no room left on its disk; only reading and deleting go on until it has")
        if not may_go_on(method, path):
            raise DiskFull(
                "the server has little room left on its disk; what was accepted goes on, and nothing new is begun:"
                " delete what you need no longer, or send this again later"
            )

    def _look(self) -> None:
        now = self._clock.now()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        self._least = min((self._free(folder) for folder in self._folders if folder.exists()), default=self._low_bytes)
        is_low = self._least < self._low_bytes
        if is_low != self._was_low:
            self._was_low = is_low
            (_log.error if is_low else _log.info)(
                "api.disk_low" if is_low else "api.disk_has_room", free_bytes=self._least, low_bytes=self._low_bytes
            )
