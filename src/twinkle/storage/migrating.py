"""Apply the migrations that a database is missing. Alembic and the tables are loaded for this alone."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, text

from twinkle.core.errors import ConfigError

_LOCK_KEY = 7_462_118_020


def migrate(engine: Engine, *, revision: str = "head") -> None:
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


def _refuse_later(connection: Connection, config: Config) -> None:
    here = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if here is not None and here not in known:
        raise ConfigError(
            f"TWINKLE_DATABASE_URL: the journal's schema is {here}, of a later version than this one, which knows"
            f" {max(known)}; run the version that made it, or go back to a backup from before"
        )
