"""The journal's stores, made and brought up to date, for the commands that look into them directly."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

from twinkle.cli.home import keep_private, make_home
from twinkle.core.actor import acting_as, operator_actor
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.storage.schema import upgrade
from twinkle.storage.stores import Stores


@contextmanager
def opened_journal(settings: Settings, *, creates: bool = False) -> Iterator[Stores]:
    """The stores of a database with the current schema.

    Args:
        settings: Which database.
        creates: Whether the embedded one is made where it is not there: looking must leave no trace.

    Raises:
        ConfigError: There is no embedded journal.
        StorageUnavailable: The database did not answer.
    """
    keep_private()
    if not settings.database_url:
        if creates:
            make_home(settings.home)
        elif not settings.journal_file.exists():
            raise ConfigError(
                f"there is no journal in {settings.home.absolute()}; name the service's folder with --home or its"
                " database with TWINKLE_DATABASE_URL, or start it with `twinkle serve`"
            )
    stores = Stores.at(settings.resolved_database_url, SystemClock(), limits=settings.tenant_limits)
    try:
        upgrade(stores.engine)
        with acting_as(operator_actor(_user())):
            yield stores
    except OperationalError as error:
        raise StorageUnavailable(f"the journal's database did not answer: {error.orig}") from error
    finally:
        stores.close()


def _user() -> str:
    """Who gives the command, as the system calls them; in a container there may be a number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
