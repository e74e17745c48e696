"""Bring a database to the current schema, or show that it is there."""

from __future__ import annotations

from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable

_LOCK_KEY = 7_462_118_020
_RETRY_S = 1.0

_log = structlog.get_logger()


def upgrade(engine: Engine, *, revision: str = "head") -> None:
    """Apply the missing migrations up to ``revision``. Several processes may call it at once; one does the work."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # A migration may compute between two statements; whoever migrates is no frozen process.
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        else:
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        connection.commit()


def upgrade_patiently(engine: Engine, clock: Clock) -> None:
    """Apply the missing migrations, however long the database stays away. Blocks."""
    while True:
        try:
            upgrade(engine)
        except StorageUnavailable as error:
            _log.warning("worker.waits_for_database", error=error.message, retry_s=_RETRY_S)
            clock.sleep(_RETRY_S)
        else:
            return
