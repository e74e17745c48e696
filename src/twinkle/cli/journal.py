"""The journal's stores, made and brought up to date, for the commands that look into them directly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from twinkle.cli.home import make_home
from twinkle.core.clock import SystemClock
from twinkle.core.errors import StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.storage.schema import upgrade
from twinkle.storage.stores import Stores


@contextmanager
def opened_journal(settings: Settings) -> Iterator[Stores]:
    """The stores of a database with the current schema.

    Raises:
        StorageUnavailable: The database did not answer.
    """
    if not settings.database_url:
        make_home(settings.home)
    stores = Stores.at(settings.resolved_database_url, SystemClock(), limits=settings.tenant_limits)
    try:
        upgrade(stores.engine)
        yield stores
    except OperationalError as error:
        raise StorageUnavailable(f"the journal's database did not answer: {error.orig}") from error
    finally:
        stores.close()
