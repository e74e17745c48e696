"""How much room there is on the disks where the journal and the objects lie, as far as they are this machine's.

Some of it is kept by a file that only takes room, the ballast, thrown overboard when a disk is so full that not even
deleting would be possible: SQLite needs a few pages of its own for every reader, and without them a full disk could be
neither read nor emptied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from twinkle.core.clock import Clock
from twinkle.core.settings import Settings

BALLAST = "ballast"
_BALLAST_BYTES = 8 * 2**20
_NEEDED_BYTES = 2 * 2**20
_LOOK_EVERY_S = 1.0

_log = structlog.get_logger()


def folders_of(settings: Settings) -> list[Path]:
    """Where the journal and the objects lie."""
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


class Disks:
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
            low_bytes: With less nothing new is accepted; 0: never mind.
            critical_bytes: With less nothing is begun, and only what deletes or reads is done.
            free: How much there is.
        """
        self._folders = folders
        self._clock = clock
        self._low_bytes = low_bytes
        self._critical_bytes = critical_bytes
        self._free = free
        self._looked_at = float("-inf")
        self._least = low_bytes
        self._was_low = False

    @classmethod
    def of(cls, settings: Settings, clock: Clock) -> Disks:
        """Those of the settings, with their marks."""
        return cls(
            folders_of(settings), clock, low_bytes=settings.disk_low_bytes, critical_bytes=settings.disk_critical_bytes
        )

    @property
    def is_low(self) -> bool:
        """Whether there is so little room that nothing new is to be accepted."""
        return bool(self._low_bytes) and self._least_free() < self._low_bytes

    @property
    def is_critical(self) -> bool:
        """Whether there is so little room that nothing is to be begun."""
        return bool(self._low_bytes) and self._least_free() < self._critical_bytes

    def _least_free(self) -> int:
        now = self._clock.now()
        if now - self._looked_at < _LOOK_EVERY_S:
            return self._least
        self._looked_at = now
        self._least = min((self._free(folder) for folder in self._folders if folder.exists()), default=self._low_bytes)
        is_low = self._least < self._low_bytes
        if is_low != self._was_low:
            self._was_low = is_low
            (_log.error if is_low else _log.info)(
                "disk.low" if is_low else "disk.has_room", free_bytes=self._least, low_bytes=self._low_bytes
            )
        return self._least


def make_way(folder: Path) -> bool:
    """Give the room free that was kept, if a disk has none left; whether that was so."""
    ballast = folder / BALLAST
    if not ballast.exists() or free_bytes(folder) >= _NEEDED_BYTES:
        return False
    ballast.unlink()
    _log.warning(
        "disk.ballast_dropped", freed_bytes=_BALLAST_BYTES, next="delete what is not needed, there is little room"
    )
    return True


def keep_room(folder: Path, *, low_bytes: int) -> None:
    """Keep some room for bad times, where there is more than enough now."""
    ballast = folder / BALLAST
    if ballast.exists() or free_bytes(folder) < low_bytes + _BALLAST_BYTES:
        return
    descriptor = os.open(ballast, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _BALLAST_BYTES)
    except OSError as error:
        _log.warning("disk.no_ballast", error=str(error))
        ballast.unlink()
    finally:
        os.close(descriptor)
