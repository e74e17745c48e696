"""A file that only takes room: thrown overboard when a disk is so full that not even deleting would be possible.

SQLite needs a few pages of its own for every reader. Without them a full disk could be neither read nor emptied.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog

BALLAST = "ballast"
_SIZE_BYTES = 8 * 2**20
_NEEDED_BYTES = 2 * 2**20

_log = structlog.get_logger()


def make_way(folder: Path) -> bool:
    """Give the room free that was kept, if a disk has none left; whether that was so."""
    ballast = folder / BALLAST
    if not ballast.exists() or shutil.disk_usage(folder).free >= _NEEDED_BYTES:
        return False
    ballast.unlink()
    _log.warning(
        "disk.ballast_dropped", freed_bytes=_SIZE_BYTES, next="delete what is not needed, there is little room"
    )
    return True


def keep_room(folder: Path, *, low_bytes: int) -> None:
    """Keep some room for bad times, where there is more than enough now."""
    ballast = folder / BALLAST
    if ballast.exists() or shutil.disk_usage(folder).free < low_bytes + _SIZE_BYTES:
        return
    descriptor = os.open(ballast, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
    except OSError as error:
        _log.warning("disk.no_ballast", error=str(error))
        ballast.unlink()
    finally:
        os.close(descriptor)
