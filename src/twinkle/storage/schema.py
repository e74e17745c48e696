"""Bring a database to the current schema, or see that it is there: what every process does before it begins."""

from __future__ import annotations

from pathlib import Path

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.database import Database

_MIGRATIONS = Path(__file__).parent / "migrations" / "versions"
_RETRY_S = 1.0

_log = structlog.get_logger()


def newest_revision() -> str:
    """The last of our migrations, by the number that its file's name begins with."""
    return max(path.name.partition("_")[0] for path in _MIGRATIONS.glob("[0-9]*.py"))


def upgrade(url: str) -> None:
    """Apply the migrations that are missing. Several processes may call it at once; one does the work.

    Where none is, as at nearly every start, it is one look: a migration is committed together with its number.

    Raises:
        ConfigError: The database is of a later version of the service.
        StorageUnavailable: It does not answer.
    """
    if _revisions(url) == [newest_revision()]:
        return
    # Half a second to load, for what is seldom needed.
    from twinkle.storage.migrating import migrate  # noqa: PLC0415
    from twinkle.storage.sql_engine import sql_engine  # noqa: PLC0415

    engine = sql_engine(url)
    try:
        migrate(engine)
    finally:
        engine.dispose()


def is_begun(url: str) -> bool:
    """Whether there is a journal in the database at all."""
    return bool(_revisions(url))


def upgrade_patiently(url: str, clock: Clock) -> None:
    """Apply the missing migrations, however long the database stays away. Blocks."""
    while True:
        try:
            upgrade(url)
        except StorageUnavailable as error:
            _log.warning("worker.waits_for_database", error=error.message, retry_s=_RETRY_S)
            clock.sleep(_RETRY_S)
        else:
            return


def _revisions(url: str) -> list[str]:
    """Those that the database says it is at: one, or none in an empty one."""
    database = Database(url)
    there = (
        "SELECT 1 AS one WHERE to_regclass('alembic_version') IS NOT NULL"
        if database.is_postgres
        else "SELECT 1 AS one FROM sqlite_master WHERE name = 'alembic_version'"
    )
    try:
        if not database.read(there):
            return []
        return [row.version_num for row in database.read("SELECT version_num FROM alembic_version")]
    finally:
        database.close()
