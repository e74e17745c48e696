"""What ``celery`` imports, in the parent and again in the spawned child that owns the device.

The parent keeps heartbeats and remote control; the child builds the engine and works.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

import structlog
from celery import signals

from twinkle.core.errors import ConfigError, TwinkleError
from twinkle.core.process.crash import crash_point
from twinkle.core.process.lazy import without_collector
from twinkle.core.process.logs import configure_logging
from twinkle.core.process.parent_death import dies_with
from twinkle.core.settings import load_settings
from twinkle.tasks.app import make_app
from twinkle.tasks.nudge import register_pump
from twinkle.workers.announcing import note_trouble
from twinkle.workers.starts import EXIT_FAILED_START, LONGEST_PAUSE_S, Starts, refuse, within

if TYPE_CHECKING:
    from twinkle.workers.process import MeshProcess

settings = load_settings()
app = make_app(settings)
# A child that holds the interpreter while it hangs cannot end itself: then Celery does, a while later.
_LATER_S = 60.0
app.conf.update(include=[__name__], worker_proc_alive_timeout=settings.start_timeout_s + LONGEST_PAUSE_S + _LATER_S)

_LONGEST_REASON = 300

_running: list[MeshProcess] = []

_log = structlog.get_logger()


def _configure_logging(**_: object) -> None:
    configure_logging(settings.log_level, settings.log_json)


def _start(sender: str, **_: object) -> None:
    _die_with_parent()
    try:
        _await_turn(Starts.begin())
        with within(settings.start_timeout_s, _give_up):
            with without_collector():
                # The child alone needs it: the parent executes nothing.
                from twinkle.workers.process import MeshProcess  # noqa: PLC0415
            process = MeshProcess(settings, app, hostname=sender)
    except ConfigError as error:
        note_trouble(settings, error.message)
        # The parent tells the reason in its last line; Celery would write the whole way there above it.
        _log.debug("worker.refused", reason=error.message, exc_info=error)
        refuse(error)
        return
    except Exception as error:  # noqa: BLE001 - Celery would log it and keep a child that never works
        _log.critical("worker.start_failed", error=str(error), next="another child is started", exc_info=error)
        _end(_reason_of(error))
    crash_point("worker.started")
    Starts.succeed()
    process.start()
    _running.append(process)


def _give_up() -> None:
    """The start hangs: say where, and let another child begin anew."""
    stack = traceback.format_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    _log.critical("worker.start_hangs", next="another child is started", stack="".join(stack))
    _end(
        f"it had not loaded its model within {settings.start_timeout_s:g} s (TWINKLE_START_TIMEOUT_S): a disk or a"
        " device that does not answer looks like this (its log says where it stood); if it only needs longer, set more"
    )


def _end(reason: str) -> None:
    """End this child, whose start came to nothing; the parent begins another one."""
    starts = Starts.fail(reason)
    note_trouble(settings, f"start {starts.number} of {settings.start_attempts} failed: {starts.reason}")
    os._exit(EXIT_FAILED_START)


def _await_turn(before: Starts) -> None:
    """Pause after starts that came to nothing, the longer the more there were.

    Raises:
        ConfigError: There were as many as there may be.
    """
    if before.number >= settings.start_attempts:
        raise ConfigError(
            f"the worker of mesh {settings.mesh} did not start in {before.number} attempts"
            f" (TWINKLE_START_ATTEMPTS); the last time: {before.reason}"
        )
    if before.number:
        note_trouble(settings, f"start {before.number} of {settings.start_attempts} failed: {before.reason}")
        _log.warning("worker.start_paused", failed=before.number, reason=before.reason, pause_s=before.pause_s)
        time.sleep(before.pause_s)


def _reason_of(error: Exception) -> str:
    said = error.message if isinstance(error, TwinkleError) else f"{type(error).__name__}: {error}"
    return said.strip().partition("\n")[0][:_LONGEST_REASON]


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
