"""What a mesh will serve, told before its model is loaded: the API lets those wait who ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.mesh import MeshAnnouncement
from twinkle.core.settings import Settings
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes

_log = structlog.get_logger()


@contextmanager
def announced(settings: Settings) -> Iterator[None]:
    """Announce the mesh, and take it back when this process has done with it.

    Raises:
        StorageUnavailable: The journal does not answer at the start.
    """
    announcement = MeshAnnouncement.of(
        model_name=settings.resolved_model_name, engine=settings.engine, serves=settings.serves
    )
    with _opened(settings) as meshes:
        meshes.announce(settings.mesh, announcement)
    try:
        yield
    finally:
        try:
            with _opened(settings) as meshes:
                meshes.withdraw(settings.mesh)
        except StorageUnavailable as error:
            _log.warning("worker.not_withdrawn", mesh=settings.mesh, error=error.message)


@contextmanager
def _opened(settings: Settings) -> Iterator[Meshes]:
    """Not for longer than a statement takes: meanwhile Celery has children."""
    database = Database(settings.resolved_database_url)
    try:
        yield Meshes(database, SystemClock())
    finally:
        database.close()
