"""What can pass is worth another attempt; a statement that is wrong is said so, once and by its name."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from harness.journal import Bench
from twinkle.core.errors import StatementFailed, StorageUnavailable, TwinkleError
from twinkle.storage.database import Database
from twinkle.storage.faults import can_pass

_WRONG = {
    "missing table": ("SELECT id FROM lanes", ()),
    "missing column": ("SELECT hat FROM lane", ()),
    "no SQL": ("SELEKT id FROM lane", ()),
    "too few values": ("SELECT id FROM lane WHERE id = ?", ()),
    "violated constraint": ("INSERT INTO lane (id) VALUES ('x')", ()),
}


@pytest.mark.parametrize(("sql", "parameters"), _WRONG.values(), ids=_WRONG)
def test_a_wrong_statement_is_no_outage_and_is_said_once_by_name(
    bench: Bench, sql: str, parameters: tuple[object, ...]
) -> None:
    def write() -> None:
        with bench.database.transaction() as transaction:
            transaction.execute(sql, parameters)

    for attempt in (write, lambda: bench.database.read(sql, parameters)):
        with capture_logs() as logs, pytest.raises(StatementFailed) as raised:
            attempt()

        assert not raised.value.retryable
        assert sql in raised.value.message
        assert [(entry["event"], entry["statement"]) for entry in logs] == [("database.statement_failed", sql)]
    assert bench.rows("SELECT COUNT(*) AS number FROM lane") == [(0,)]


def test_a_wrong_statement_through_sqlalchemy_is_no_outage_either(bench: Bench) -> None:
    with bench.engine.connect() as connection, pytest.raises(StatementFailed, match="SELECT hat FROM lane"):
        connection.execute(text("SELECT hat FROM lane"))


def test_what_a_transaction_did_before_a_wrong_statement_is_undone(bench: Bench) -> None:
    def write() -> None:
        with bench.database.transaction() as transaction:
            transaction.execute("INSERT INTO mesh (name, epoch, expires_at) VALUES ('m', 0, 0)")
            transaction.execute("UPDATE lane SET hat = 1")

    with pytest.raises(StatementFailed):
        write()

    assert bench.rows("SELECT name FROM mesh") == []


def _error_of(write: Callable[[], object]) -> TwinkleError:
    with pytest.raises(TwinkleError) as raised:
        write()
    return raised.value


def _insert_mesh(database: Database, name: str, size: int = 1) -> None:
    with database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO mesh (name, capabilities, epoch, expires_at) VALUES (?, ?, 0, 0)", (name, "x" * size)
        )


def test_a_locked_database_can_be_asked_again(bench: Bench) -> None:
    holder = Database(bench.url)
    patience = "SET lock_timeout = '50ms'" if bench.database.is_postgres else "PRAGMA busy_timeout = 50"
    with bench.database.transaction() as transaction:
        transaction.execute(patience)
    with holder.transaction() as transaction:
        lock = "LOCK TABLE mesh IN ACCESS EXCLUSIVE MODE" if holder.is_postgres else "UPDATE mesh SET epoch = 1"
        transaction.execute(lock)
        error = _error_of(lambda: _insert_mesh(bench.database, "m"))
    holder.close()

    assert isinstance(error, StorageUnavailable)
    _insert_mesh(bench.database, "m")


def test_a_full_sqlite_disk_can_be_asked_again(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    num_pages = database.read("PRAGMA page_count")[0].page_count
    database.read(f"PRAGMA max_page_count = {num_pages}")

    error = _error_of(lambda: _insert_mesh(database, "m", size=1 << 20))

    assert isinstance(error, StorageUnavailable)
    _insert_mesh(database, "m", size=1 << 20)
    database.close()


def test_a_sqlite_file_that_is_away_can_be_asked_again(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/away/journal.db")

    assert isinstance(_error_of(lambda: database.read("SELECT 1 AS one")), StorageUnavailable)
    (tmp_path / "away").mkdir()
    assert database.read("SELECT 1 AS one") == [(1,)]
    database.close()


def test_a_cut_postgres_connection_can_be_asked_again(postgres_url: str, postgres_server_url: str) -> None:
    database = Database(postgres_url)
    backend = database.read("SELECT pg_backend_pid() AS pid")[0].pid
    with psycopg.connect(postgres_server_url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))

    assert isinstance(_error_of(lambda: database.read("SELECT 1 AS one")), StorageUnavailable)
    assert database.read("SELECT 1 AS one") == [(1,)]
    database.close()


def test_an_absent_postgres_server_can_be_asked_again(tmp_path: Path) -> None:
    database = Database(f"postgresql://nobody@/nothing?host={tmp_path}")

    assert isinstance(_error_of(lambda: database.read("SELECT 1 AS one")), StorageUnavailable)


@pytest.mark.parametrize(
    ("state", "passes"),
    [
        ("08006", True),
        ("40001", True),
        ("40P01", True),
        ("53100", True),
        ("53300", True),
        ("57014", True),
        ("57P01", True),
        ("55P03", True),
        ("25006", True),
        ("25P03", True),
        ("58030", True),
        ("42P01", False),
        ("42703", False),
        ("42601", False),
        ("23505", False),
        ("22003", False),
        ("25P02", False),
        ("54000", False),
    ],
)
def test_what_a_postgres_server_says_decides_whether_it_can_pass(postgres_url: str, state: str, passes: bool) -> None:
    database = Database(postgres_url)

    def fail() -> None:
        with database.transaction() as transaction:
            transaction.execute(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}'; END $$")

    error = _error_of(fail)

    assert isinstance(error, StorageUnavailable if passes else StatementFailed)
    database.close()


def test_an_error_of_the_driver_alone_cannot_pass() -> None:
    assert not can_pass(sqlite3.ProgrammingError("Cannot operate on a closed database."))
    assert not can_pass(psycopg.ProgrammingError("the query has 1 placeholder but 0 parameters were passed"))
