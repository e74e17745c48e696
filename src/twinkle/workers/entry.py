"""The ``twinkle worker`` process: a Celery worker with one spawned child that owns the device."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from pathlib import Path

import structlog

from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings, environment_of
from twinkle.hub.support import check_model
from twinkle.storage.schema import upgrade_patiently
from twinkle.tasks.app import mesh_queue
from twinkle.tasks.surroundings import check_surroundings
from twinkle.workers.announcing import announced, note_trouble
from twinkle.workers.starts import STARTS_FILE, Starts

_log = structlog.get_logger()

# Without these glibc maps and unmaps memory for every large tensor. Set before the child starts: it reads them once.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "4294967295"}


def run_worker(settings: Settings) -> int:
    """Serve one mesh until SIGTERM; the exit status.

    The child is a fresh interpreter and reads the settings from the environment, so they are put there first, and the
    application is imported only then.

    Raises:
        ConfigError: The child cannot build its engine with these settings.
    """
    if settings.engine != "null" and settings.model:
        _check_model(settings)
    check_surroundings(settings)
    # Waited for here first: until the pool has its child, Celery would hold back whoever asks this process to end.
    upgrade_patiently(settings.resolved_database_url, SystemClock())
    os.environ.update({**_ALLOCATOR, **os.environ, **environment_of(settings)})
    from twinkle.workers.celery_app import app  # noqa: PLC0415 - reads the environment when imported

    with announced(settings), tempfile.TemporaryDirectory(prefix="twinkle-starts-") as folder:
        file = Path(folder) / "starts"
        file.touch()
        os.environ[STARTS_FILE] = str(file)
        worker = app.Worker(
            hostname=f"{settings.mesh}@{socket.gethostname()}",
            pool="prefork",
            concurrency=1,
            queues=[mesh_queue(settings.mesh)],
            loglevel=settings.log_level,
            without_gossip=True,
            without_mingle=True,
            optimization="fair",
        )
        worker.start()
        refusal = Starts.read().refusal
    if refusal:
        raise ConfigError(refusal)
    return int(worker.exitcode or 0)


def _check_model(settings: Settings) -> None:
    try:
        check_model(settings.model)
    except ConfigError as error:
        if settings.database_url or settings.journal_file.exists():
            note_trouble(settings, error.message)
        raise


def wait_refused(error: ConfigError) -> None:
    """Block until somebody asks this process to end: a restart would come to the same refusal."""
    asked = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    _log.critical("worker.refused", reason=error.message, next="it waits to be stopped; mend it and start it anew")
    signal.sigwait(asked)
