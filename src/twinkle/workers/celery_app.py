"""What ``celery`` imports, in the parent and again in the spawned child that owns the device.

The parent keeps heartbeats and remote control; the child builds the engine and works.
"""

from __future__ import annotations

from celery import signals

from twinkle.core.errors import ConfigError
from twinkle.core.logs import configure_logging
from twinkle.core.settings import load_settings
from twinkle.tasks.app import make_app
from twinkle.tasks.pump import register_pump
from twinkle.workers.process import MeshProcess
from twinkle.workers.refusal import refuse

settings = load_settings()
app = make_app(settings)
app.conf.update(include=[__name__], worker_proc_alive_timeout=600.0)

_running: list[MeshProcess] = []


def _configure_logging(**_: object) -> None:
    configure_logging(settings.log_level, settings.log_json)


def _start(sender: str, **_: object) -> None:
    try:
        process = MeshProcess(settings, app, hostname=sender)
    except ConfigError as error:
        refuse(error)
        raise
    process.start()
    _running.append(process)


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
