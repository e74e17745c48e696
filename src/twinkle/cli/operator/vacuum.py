"""``twinkle vacuum``: give back to the disk what deleted rows took."""

from __future__ import annotations

import json

from twinkle.cli.console import say
from twinkle.cli.operator.journal import opened_journal
from twinkle.core.errors import StorageUnavailable
from twinkle.core.settings import Settings
from twinkle.storage.disks import keep_room, make_way
from twinkle.storage.sql_engine import sql_engine
from twinkle.storage.upkeep.vacuum import vacuum


def vacuum_journal(settings: Settings, *, as_json: bool) -> None:
    """Shrink the journal's database, on a full disk too.

    Raises:
        StorageUnavailable: It cannot be done now.
    """
    if not settings.database_url:
        make_way(settings.home)
    with opened_journal(settings) as stores:
        engine = sql_engine(stores.database.url)
        try:
            vacuumed = vacuum(engine)
        except StorageUnavailable as error:
            raise StorageUnavailable(
                f"{error.message}; the database is written anew, which takes as much room as its rows have, and nobody"
                " may hold it meanwhile: free some room or stop the service, then try again"
            ) from error
        finally:
            engine.dispose()
    if not settings.database_url:
        keep_room(settings.home, low_bytes=settings.disk_low_bytes)
    if as_json:
        say(json.dumps({"before_bytes": vacuumed.before_bytes, "after_bytes": vacuumed.after_bytes}))
    else:
        say(f"the journal has {vacuumed.after_bytes} bytes, and had {vacuumed.before_bytes}")
