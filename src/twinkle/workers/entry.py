"""The ``twinkle worker`` process: a Celery worker with one spawned child that owns the device."""

from __future__ import annotations

import os
import socket

from twinkle.core.settings import Settings, environment_of
from twinkle.tasks.app import mesh_queue


def run_worker(settings: Settings) -> int:
    """Serve one mesh until SIGTERM; the exit status.

    The child is a fresh interpreter and reads the settings from the environment, so they are put there first, and the
    application is imported only then.
    """
    os.environ.update(environment_of(settings))
    from twinkle.workers.celery_app import app  # noqa: PLC0415 - reads the environment when imported

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
    return int(worker.exitcode or 0)
