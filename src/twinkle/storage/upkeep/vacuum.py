"""Giving back to the disk what deleted rows took: a database keeps their room for itself until it is told."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine


@dataclass(frozen=True)
class Vacuumed:
    """How large the database was, and is."""

    before_bytes: int
    after_bytes: int


def vacuum(engine: Engine) -> Vacuumed:
    """Shrink a database. Blocks for as long as it takes to write all of it anew; writers wait meanwhile.

    Raises:
        StorageUnavailable: It is locked for too long, or the disk has no room for what is written anew.
    """
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:

        def size_bytes() -> int:
            if is_sqlite:
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                return int(pages * connection.exec_driver_sql("PRAGMA page_size").scalar_one())
            return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())

        before_bytes = size_bytes()
        connection.exec_driver_sql("VACUUM" if is_sqlite else "VACUUM (FULL, ANALYZE)")
        if is_sqlite:
            # Until then the file is as long as it was, and the log beside it too.
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return Vacuumed(before_bytes, size_bytes())
