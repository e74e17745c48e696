"""Bring a database to the current schema, or show that it is there."""

from __future__ import annotations

from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from twinkle.core.clock import Clock
from twinkle.core.errors import ConfigError, StorageUnavailable

_LOCK_KEY = 7_462_118_020
_RETRY_S = 1.0

_log = structlog.get_logger()


def upgrade(engine: Engine, *, revision: str = "head") -> None:
    """Apply the missing migrations up to ``revision``. Several processes may call it at once; one does the work.

    Raises:
        ConfigError: The database is of a later version of the service.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            # A migration may compute between two statements; whoever migrates is no frozen process.
            connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        else:
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
        config.attributes["connection"] = connection
        _refuse_later(connection, config)
        command.upgrade(config, revision)
        connection.commit()


def is_begun(engine: Engine) -> bool:
    """Whether there is a journal in the database at all."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision() is not None


def _refuse_later(connection: Connection, config: Config) -> None:
    here = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if here is not None and here not in known:
        raise ConfigError(
            f"TWINKLE_DATABASE_URL: the journal's schema is {here}, of a later version than this one, which knows"
            f" {max(known)}; run the version that made it, or go back to a backup from before"
        )


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
