"""Why a mesh has no worker, written where `twinkle status` reads it."""

from __future__ import annotations

import structlog

from twinkle.core.clock import SystemClock
from twinkle.core.errors import TwinkleError
from twinkle.core.settings import Settings
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes

_log = structlog.get_logger()


def note_trouble(settings: Settings, reason: str) -> None:
    """Write it down, if the journal answers; the log has it in any case."""
    database = Database(settings.resolved_database_url)
    try:
        Meshes(database, SystemClock()).note_trouble(settings.mesh, reason)
    except TwinkleError as error:
        _log.warning("worker.trouble_not_noted", reason=reason, error=error.message)
    finally:
        database.close()
