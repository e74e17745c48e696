"""The journal's database, made and brought up to date, for the commands that look into it directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from twinkle.cli.home import make_home
from twinkle.core.errors import StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.storage.database import sql_engine
from twinkle.storage.schema import upgrade


@contextmanager
def opened_journal(settings: Settings) -> Iterator[Engine]:
    """An engine on a database with the current schema.

    Raises:
        StorageUnavailable: The database did not answer.
    """
    if not settings.database_url:
        make_home(settings.home)
    engine = sql_engine(settings.resolved_database_url)
    try:
        upgrade(engine)
        yield engine
    except OperationalError as error:
        raise StorageUnavailable(f"the journal's database did not answer: {error.orig}") from error
    finally:
        engine.dispose()
