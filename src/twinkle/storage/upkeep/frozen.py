"""Processes that stand still with locks of PostgreSQL in their hands, where the server does not end them by itself.

It ends a connection that waits in a transaction for its client (``idle_in_transaction_session_timeout``), but not one
whose client has sent a part of what travels together and then stopped, by SIGSTOP or with its whole machine: to the
server that one is at work. Its locks would stay, on the mesh or on lanes, and whoever takes over would wait for them.
"""

from __future__ import annotations

import threading

import structlog

from twinkle.core.errors import StatementFailed, StorageUnavailable
from twinkle.storage.database import APPLICATION, FROZEN_AFTER_S, Database

_LOOK_EVERY_S = 1.0

_log = structlog.get_logger()


def end_frozen(database: Database, *, after_s: float = FROZEN_AFTER_S) -> int:
    """End the connections of ours whose client has stopped in the middle of a journey; how many there were.

    What they had not committed is rolled back. Their processes find the connection gone when they go on, as after any
    loss of the database.

    Raises:
        StorageUnavailable: The database did not answer.
    """
    told = database.read(
        "SELECT pid, pg_terminate_backend(pid) AS is_ended FROM pg_stat_activity"
        " WHERE datname = current_database() AND usename = current_user AND application_name = ?"
        " AND state = 'active' AND wait_event_type = 'Client' AND wait_event = 'ClientRead'"
        " AND state_change < clock_timestamp() - make_interval(secs => ?)",
        (APPLICATION, after_s),
    )
    # One of them may have ended by itself meanwhile.
    ended = [row.pid for row in told if row.is_ended]
    for pid in ended:
        _log.warning("database.frozen_client_ended", server_pid=pid, after_s=after_s, next="its locks are free")
    return len(ended)


class FrozenClients:
    """Looks for them every second, in a thread with a connection of its own: any other may wait for their locks."""

    def __init__(self, url: str) -> None:
        self._database = Database(url, statement_timeout_s=FROZEN_AFTER_S)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frozen-clients", daemon=True)

    def start(self) -> None:
        """Begin, where the database is a PostgreSQL: SQLite has one lock, which ends with its process or goes on."""
        if self._database.is_postgres:
            self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            try:
                end_frozen(self._database)
            except StorageUnavailable as error:
                _log.debug("database.not_looked_for_frozen", error=error.message, next="tried again in a second")
            except StatementFailed as error:
                _log.error("database.not_looked_for_frozen", error=str(error), next="nobody looks until the next start")
                return
        self._database.close()
