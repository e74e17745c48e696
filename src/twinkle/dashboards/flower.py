"""Flower in this process, on our broker, behind a password.

What the password does not cover: Flower 2.2 answers ``/metrics``, ``/healthcheck`` and ``/static`` to anybody. The
metrics carry the names of workers and tasks, never a tenant's. Therefore Flower listens on loopback unless told
otherwise; whoever puts it on a network puts a reverse proxy before it that guards these paths too.

It is read-only: an operation belongs to the journal, and revoking or sending a Celery task would do it no good.
"""

from __future__ import annotations

import signal

import structlog
from flower.app import Flower
from flower.options import options
from flower.urls import settings as tornado_settings

from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.tasks.app import make_app

# 4.6 kB a task: the default of 100,000 would be half a gigabyte.
_MAX_TASKS = 10_000
# kwargs carry tenant, adapter and seq; there is never data in them.
# The arguments are the short "tenant, adapter, number"; the keyword arguments, in full, are on each task's own page.
_COLUMNS = "name,state,args,runtime,received,retries,worker,uuid"
_INSPECT_TIMEOUT_MS = 2000.0

_log = structlog.get_logger()


def run_flower(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Blocks.

    Raises:
        ConfigError: There is no password, or the port is taken.
    """
    password = settings.flower_password.get_secret_value()
    if not password:
        raise ConfigError("TWINKLE_FLOWER_PASSWORD is missing: Flower shows every tenant's work and must have one")
    options.address = settings.flower_host
    options.port = settings.flower_port
    options.basic_auth = [f"{settings.flower_user}:{password}"]
    options.max_tasks = _MAX_TASKS
    options.natural_time = True
    options.tasks_columns = _COLUMNS
    options.inspect_timeout = _INSPECT_TIMEOUT_MS
    options.read_only = True
    flower = Flower(capp=make_app(settings), options=options, **tornado_settings)
    try:
        flower.start_http_server()
    except OSError as error:
        where = f"{settings.flower_host}:{settings.flower_port}"
        raise ConfigError(f"Flower cannot listen on {where}: {error.strerror}") from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: flower.io_loop.add_callback_from_signal(flower.stop))
    _log.info("flower.started", host=settings.flower_host, port=settings.flower_port)
    flower.start()
    _log.info("flower.stopped")
