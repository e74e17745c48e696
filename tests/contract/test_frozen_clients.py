"""Who stops in the midst of what travels together to PostgreSQL keeps no locks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
import pytest
from structlog.testing import capture_logs

from harness.polling import wait_until
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.database import APPLICATION, Database, postgres_options
from twinkle.storage.pipelined import Statements
from twinkle.storage.upkeep.frozen import FrozenClients, end_frozen

LOCKING = "UPDATE alembic_version SET version_num = version_num"
WAITS = "SELECT 1 AS one FROM pg_stat_activity WHERE pid = ? AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'"
SOON_S = 0.2


@contextmanager
def stopped(url: str, *, application: str = APPLICATION) -> Iterator[psycopg.Connection[object]]:
    """A connection as those of ours, whose process has sent a part of a transaction, and stands still."""
    watch = Database(url)
    connection = psycopg.connect(
        url,
        autocommit=True,
        options=postgres_options(url),
        application_name=application,
        row_factory=psycopg.rows.dict_row,
    )
    pipeline = connection.pipeline()
    pipeline.__enter__()
    statements = Statements(connection, pipeline)
    statements.execute("BEGIN", name="BEGIN")
    statements.execute(LOCKING, name=LOCKING)
    statements.send()
    try:
        pid = connection.info.backend_pid
        wait_until(lambda: bool(watch.read(WAITS, (pid,))), what="it holds its lock")
        yield connection
    finally:
        connection.close()
        watch.close()


def lock(database: Database) -> None:
    with database.transaction() as transaction:
        transaction.execute(LOCKING)


def test_who_stops_in_the_midst_of_a_journey_is_ended_and_its_locks_are_free(postgres_url: str) -> None:
    database, patient = Database(postgres_url), Database(postgres_url, statement_timeout_s=SOON_S)
    with stopped(postgres_url) as connection, capture_logs() as logs:
        with pytest.raises(StorageUnavailable):
            lock(patient)

        wait_until(lambda: end_frozen(database, after_s=SOON_S) == 1, what="the client that stands still is found")
        lock(database)

        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert [line["server_pid"] for line in logs if line["event"] == "database.frozen_client_ended"]
    database.close()
    patient.close()


def test_who_is_at_work_or_somebody_elses_is_not_ended(postgres_url: str) -> None:
    database, sleeper = Database(postgres_url), Database(postgres_url)
    asleep = threading.Thread(target=sleeper.read, args=("SELECT pg_sleep(1)",))
    asleep.start()
    sleeping = "SELECT 1 AS one FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    wait_until(lambda: bool(database.read(sleeping)), what="a statement that takes long")
    with ExitStack() as others:
        # A dump that is read in by the same role, say.
        others.enter_context(stopped(postgres_url, application="psql"))
        between = others.enter_context(sleeper.transaction(together=True))
        assert between.execute("SELECT 1 AS one").fetchone()

        assert end_frozen(database, after_s=0) == 0
        assert between.execute("SELECT 2 AS two").fetchone()
    asleep.join()
    database.close()
    sleeper.close()


def test_housekeeping_looks_for_them_by_itself(postgres_url: str) -> None:
    """At the setting that is shipped, and while another waits for the lock without an end."""
    database, watch = Database(postgres_url), FrozenClients(postgres_url)
    watch.start()
    try:
        with stopped(postgres_url):
            lock(database)
    finally:
        watch.stop()
        database.close()


def test_of_sqlite_nobody_looks(sqlite_url: str) -> None:
    watch = FrozenClients(sqlite_url)

    watch.start()
    watch.stop()
