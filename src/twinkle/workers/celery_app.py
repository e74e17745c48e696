"""What ``celery`` imports, in the parent and again in the spawned child that owns the device.

The parent keeps heartbeats and remote control; the child builds the engine and works.
"""

from __future__ import annotations

import os
import time

import structlog
from celery import signals

from twinkle.core.errors import ConfigError
from twinkle.core.logs import configure_logging
from twinkle.core.parent_death import dies_with
from twinkle.core.settings import load_settings
from twinkle.tasks.app import make_app
from twinkle.tasks.nudge import register_pump
from twinkle.workers.process import EXIT_FAILED_START, MeshProcess
from twinkle.workers.refusal import refuse

settings = load_settings()
app = make_app(settings)
app.conf.update(include=[__name__], worker_proc_alive_timeout=600.0)

_FAILED_START_PAUSE_S = 2.0

_running: list[MeshProcess] = []

_log = structlog.get_logger()


def _configure_logging(**_: object) -> None:
    configure_logging(settings.log_level, settings.log_json)


def _start(sender: str, **_: object) -> None:
    _die_with_parent()
    try:
        process = MeshProcess(settings, app, hostname=sender)
    except ConfigError as error:
        refuse(error)
        raise
    except Exception as error:  # noqa: BLE001 - Celery would log it and keep a child that never works
        _log.critical("worker.start_failed", error=str(error), next="another child is started", exc_info=error)
        time.sleep(_FAILED_START_PAUSE_S)
        os._exit(EXIT_FAILED_START)
    process.start()
    _running.append(process)


def _die_with_parent() -> None:
    """An orphan would keep the mesh's lease for ever: nobody restarts it, and nobody can take over."""
    ask = dies_with(os.getppid())
    if ask is not None:
        ask()


def _stop(**_: object) -> None:
    while _running:
        _running.pop().stop()


def pump() -> None:
    """Look into the journal."""
    for process in _running:
        process.pump()


register_pump(app, pump)
signals.setup_logging.connect(_configure_logging)
signals.worker_process_init.connect(_start)
signals.worker_process_shutdown.connect(_stop)
