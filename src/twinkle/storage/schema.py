"""Bring a database to the current schema, or show that it is there."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, text

_LOCK_KEY = 7_462_118_020


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
