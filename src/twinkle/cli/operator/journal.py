"""The journal's stores, made and brought up to date, for the commands that look into them directly."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twinkle.cli.embedded.home import keep_private, make_home
from twinkle.core.actor import acting_as, operator_actor
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.storage.home import close_home
from twinkle.storage.schema import is_begun, upgrade
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
    if creates and not settings.database_url:
        make_home(settings.home)
    elif not creates and _is_missing(settings):
        place = settings.home.absolute() if not settings.database_url else "the database of TWINKLE_DATABASE_URL"
        raise ConfigError(
            f"there is no journal in {place}; name the service's folder with --home or its"
            " database with TWINKLE_DATABASE_URL, or start it with `twinkle serve`"
        )
    stores = Stores.at(settings.resolved_database_url, SystemClock(), limits=settings.tenant_limits)
    try:
        upgrade(stores.database.url)
        with acting_as(operator_actor(_user())):
            yield stores
    finally:
        stores.close()


def _is_missing(settings: Settings) -> bool:
    """Whether a journal would have to be made first."""
    url = settings.resolved_database_url
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        return True
    if not settings.database_url:
        _close(settings.home)
    return not is_begun(url)


def _close(home: Path) -> None:
    """Take from others what an earlier version left open to them, where that is ours to take."""
    with suppress(PermissionError):
        close_home(home.absolute())


def _user() -> str:
    """Who gives the command, as the system calls them; in a container there may be a number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
