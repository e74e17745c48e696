"""What is said of a mesh that does not serve yet: what it will serve, before its model is loaded, or why it does not.

The API lets those wait who ask for what is announced; ``twinkle status`` shows why nobody came.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable, TwinkleError
from twinkle.core.mesh import MeshAnnouncement
from twinkle.core.settings import Settings
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import ANNOUNCED_S, Meshes

_log = structlog.get_logger()

_RENEW_EVERY_S = ANNOUNCED_S / 8


@contextmanager
def announced(settings: Settings, *, renew_every_s: float = _RENEW_EVERY_S) -> Iterator[None]:
    """Announce the mesh, again and again until it serves, and take it back when this process has done with it.

    If this process is killed, the announcement ends by itself: who waits for the mesh is refused then, not put off. One
    that cannot load the model ends after ``start_attempts`` of ``start_timeout_s`` at most.

    Raises:
        StorageUnavailable: The journal does not answer at the start.
    """
    announcement = MeshAnnouncement.of(
        model_name=settings.resolved_model_name, engine=settings.engine, serves=settings.serves
    )
    with _opened(settings) as meshes:
        meshes.announce(settings.mesh, announcement)
    done = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(settings, announcement, done, renew_every_s), name="announcing", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        done.set()
        renewing.join()
        try:
            with _opened(settings) as meshes:
                meshes.withdraw(settings.mesh)
        except StorageUnavailable as error:
            _log.warning("worker.not_withdrawn", mesh=settings.mesh, error=error.message)


def note_trouble(settings: Settings, reason: str) -> None:
    """Write down why there is no worker, if the journal answers; the log has it in any case."""
    try:
        with _opened(settings) as meshes:
            meshes.note_trouble(settings.mesh, reason)
    except TwinkleError as error:
        _log.warning("worker.trouble_not_noted", reason=reason, error=error.message)


def _renew(settings: Settings, announcement: MeshAnnouncement, done: threading.Event, every_s: float) -> None:
    """Until the mesh has said what it can do, or this process has done with it."""
    while not done.wait(every_s):
        try:
            with _opened(settings) as meshes:
                if not meshes.renew_announcement(settings.mesh, announcement):
                    return
        except StorageUnavailable as error:
            _log.warning("worker.announcement_not_renewed", mesh=settings.mesh, error=error.message)


@contextmanager
def _opened(settings: Settings) -> Iterator[Meshes]:
    """Not for longer than a statement takes: meanwhile Celery has children."""
    database = Database(settings.resolved_database_url)
    try:
        yield Meshes(database, SystemClock())
    finally:
        database.close()
