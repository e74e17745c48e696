"""The two databases behind one small door: short transactions in plain SQL, one connection per thread.

Statements are written once, with ``?`` placeholders, in the dialect both SQLite and PostgreSQL understand. What
differs is here: placeholders, row locks, and how a transaction begins.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict

from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.storage.faults import CALL_ERRORS, DRIVER_ERRORS, fault_of
from twinkle.storage.pipelined import Statements, pipelined

BUSY_TIMEOUT_S = 30
_BUSY_PAUSE_S = 0.02
_CONNECT_TIMEOUT_S = 5
FROZEN_AFTER_S = 5.0
"""A transaction of ours never pauses: one that does is a frozen process's, which must not keep its locks. Migrations
are excepted, by themselves. What the server does not end by itself, :mod:`twinkle.storage.upkeep.frozen` does."""
APPLICATION = "twinkle"
"""What our connections are called in ``pg_stat_activity``."""
_STEPS_BETWEEN_LOOKS = 100_000
"""Of SQLite's own machine: a few milliseconds."""
_SQLITE_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # Safe against the death of a process; a power cut may drop the last commits, never corrupt.
    "PRAGMA synchronous=NORMAL",
    f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}",
    "PRAGMA foreign_keys=ON",
    "PRAGMA temp_store=MEMORY",
    "PRAGMA cache_size=-20000",
)


class Row(Protocol):
    """A row of an answer; each column is an attribute. A statement gives every column a name of its own (``AS``)."""

    def __getattr__(self, column: str) -> Any:
        """The value of a column."""
        ...


@lru_cache(maxsize=512)
def _row_of(columns: tuple[str, ...]) -> Callable[[Iterable[Any]], Row]:
    """What makes rows of these columns."""
    # A checker wants the names of a named tuple in its text.
    make_type: Any = namedtuple
    made: Callable[[Iterable[Any]], Row] = make_type("Row", columns, rename=True)._make
    return made


def _sqlite_row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> Row:
    return _row_of(tuple(column[0] for column in cursor.description))(values)


def _postgres_rows(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], Row]:
    return _row_of(tuple(column.name for column in cursor.description or ()))


class Cursor(Protocol):
    """What both drivers' cursors share."""

    @property
    def rowcount(self) -> int:
        """Rows the last statement changed."""
        ...

    def fetchone(self) -> Row | None:
        """The next row."""
        ...

    def fetchall(self) -> list[Row]:
        """All rows left."""
        ...


Asked: TypeAlias = Callable[[], list[Row]]
"""The rows of an answer that may still be on its way."""


class Transaction:
    """One open transaction. Never leaves the thread that began it."""

    def __init__(
        self, connection: sqlite3.Connection | psycopg.Connection[Row] | Statements, *, is_postgres: bool
    ) -> None:
        self._connection = connection
        self._is_postgres = is_postgres

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        """Run one statement. ``FOR UPDATE`` and ``FOR SHARE`` clauses are dropped where one writer is the rule.

        Where statements travel together it is sent when somebody looks at this answer or at a later one, or when the
        transaction ends; an error is raised there.
        """
        if isinstance(self._connection, Statements):
            return self._connection.execute(_translate(sql, True), parameters, name=sql)
        try:
            return self._connection.execute(_translate(sql, self._is_postgres), parameters)
        except CALL_ERRORS as error:
            raise fault_of(error, statement=sql) from error

    def ask(self, sql: str, parameters: Sequence[object] = ()) -> Asked:
        """Run a statement whose rows are read later: by what is returned, once, also after the transaction's end.

        Where they are a journey away, other statements travel meanwhile.
        """
        cursor = self.execute(sql, parameters)
        if isinstance(self._connection, Statements):
            return cursor.fetchall
        # They are at hand, and SQLite ends no transaction before they are read.
        rows = cursor.fetchall()
        return lambda: rows

    def ask_for_each(self, sql: str, keys: Sequence[str], parameters: Sequence[object]) -> Asked:
        """The same of a limited query, once for each key, its first parameter; rows stand in no particular order."""
        if not self._is_postgres:
            rows = [row for key in keys for row in self.execute(sql, (key, *parameters)).fetchall()]
            return lambda: rows
        of_key = sql.replace("?", "k.key", 1)
        lateral = f"SELECT each.* FROM UNNEST(CAST(? AS TEXT[])) AS k(key) CROSS JOIN LATERAL ({of_key}) AS each"
        return self.ask(lateral, (list(keys), *parameters))


@lru_cache(maxsize=512)
def _translate(sql: str, is_postgres: bool) -> str:
    if is_postgres:
        return sql.replace("?", "%s")
    return sql.replace(" FOR UPDATE", "").replace(" FOR SHARE", "")


class _Connections(threading.local):
    """This thread's connection, if it has opened one."""

    sqlite: sqlite3.Connection | None = None
    postgres: psycopg.Connection[Row] | None = None


class _Patience(threading.local):
    """How long a statement may take in SQLite, which knows no such limit itself. Each thread has its own."""

    ends_at = float("inf")

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s

    def watch(self, connection: sqlite3.Connection) -> None:
        """Have a connection's statements ended that take longer."""
        if self.timeout_s is not None:
            connection.set_progress_handler(self._is_over, _STEPS_BETWEEN_LOOKS)

    def begin(self) -> None:
        """A statement begins, or a short transaction of several."""
        if self.timeout_s is not None:
            self.ends_at = time.monotonic() + self.timeout_s

    def _is_over(self) -> bool:
        return time.monotonic() > self.ends_at


class Database:
    """Connections to one database, SQLite or PostgreSQL."""

    def __init__(self, url: str, *, statement_timeout_s: float | None = None) -> None:
        """Open nothing yet.

        Args:
            url: ``sqlite:///absolute/path`` or ``postgresql://user@host/name``.
            statement_timeout_s: How long one statement may take; then it is ended as if the database were away.

        Raises:
            ConfigError: Another scheme.
        """
        self.is_postgres = url.startswith(("postgresql://", "postgres://"))
        if not self.is_postgres and not url.startswith("sqlite:///"):
            raise ConfigError(f"database_url: {url.split(':')[0]}:// is not supported; use sqlite:/// or postgresql://")
        self.url = url
        self._open = _Connections()
        self._patience = _Patience(statement_timeout_s)

    @contextmanager
    def transaction(self, *, together: bool = False) -> Iterator[Transaction]:
        """A write transaction: commits at the end of the block, rolls back when it raises.

        Args:
            together: Whether statements travel to PostgreSQL as many at a time as can (:mod:`.pipelined`): for those of
                many statements, whose answers are asked for late. A short one is cheaper without.

        Raises:
            StorageUnavailable: The database did not answer, was busy too long, or broke a deadlock; nothing was
                written and the caller may try again.
            StatementFailed: A statement is wrong; nothing was written, and nothing would be another time.
        """
        try:
            if self.is_postgres:
                connection = self._postgres()
                begun = pipelined(connection) if together else _plain(connection)
                with begun as statements:
                    yield Transaction(statements, is_postgres=True)
            else:
                with self._sqlite_transaction() as transaction:
                    yield transaction
        except StorageUnavailable:
            self.close()
            raise
        except DRIVER_ERRORS as error:
            self.close()
            raise fault_of(error, statement="") from error

    @contextmanager
    def _sqlite_transaction(self) -> Iterator[Transaction]:
        connection = self._sqlite()
        connection.execute("BEGIN IMMEDIATE")
        self._patience.begin()
        try:
            yield Transaction(connection, is_postgres=False)
        except BaseException:
            connection.rollback()
            raise
        connection.commit()

    def read(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Run one query in a transaction of its own."""
        try:
            if self.is_postgres:
                return self._postgres().execute(_translate(sql, True), parameters).fetchall()
            connection = self._sqlite()
            self._patience.begin()
            return connection.execute(_translate(sql, False), parameters).fetchall()
        except CALL_ERRORS as error:
            self.close()
            raise fault_of(error, statement=sql) from error

    def close(self) -> None:
        """Close this thread's connection; the next statement opens a new one."""
        if self._open.sqlite is not None:
            self._open.sqlite.close()
            self._open.sqlite = None
        if self._open.postgres is not None:
            self._open.postgres.close()
            self._open.postgres = None

    def _sqlite(self) -> sqlite3.Connection:
        if self._open.sqlite is None:
            path = Path(self.url.removeprefix("sqlite:///"))
            connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, cached_statements=256)
            connection.row_factory = _sqlite_row
            try:
                apply_pragmas(connection)
            except BaseException:
                # Nobody else would close it before the garbage is looked for.
                connection.close()
                raise
            self._patience.watch(connection)
            self._open.sqlite = connection
        return self._open.sqlite

    def _postgres(self) -> psycopg.Connection[Row]:
        if self._open.postgres is None or self._open.postgres.closed:
            self._open.postgres = psycopg.connect(
                self.url,
                autocommit=True,
                row_factory=_postgres_rows,
                connect_timeout=_CONNECT_TIMEOUT_S,
                options=postgres_options(self.url, self._patience.timeout_s),
                application_name=APPLICATION,
            )
        return self._open.postgres


@contextmanager
def _plain(connection: psycopg.Connection[Row]) -> Iterator[psycopg.Connection[Row]]:
    """A transaction whose statements are answered one by one."""
    with connection.transaction():
        yield connection


def raised(tag: str) -> str:
    """A column's value, but no less than a floor, which is to be given twice: what was idle goes on from there."""
    return f"CASE WHEN {tag} < ? THEN CAST(? AS DOUBLE PRECISION) ELSE {tag} END"


def placeholders(values: Collection[object]) -> str:
    """The inside of an ``IN (...)``; of nothing it is ``NULL``, which nothing equals, since ``IN ()`` is an error."""
    return ", ".join("?" * len(values)) or "NULL"


def apply_pragmas(connection: _Executes) -> None:
    """Set a new connection up. The change to WAL does not wait for a lock by itself, whatever the busy timeout."""
    ends_at = time.monotonic() + BUSY_TIMEOUT_S
    for pragma in _SQLITE_PRAGMAS:
        while True:
            try:
                connection.execute(pragma)
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > ends_at:
                    raise
            time.sleep(_BUSY_PAUSE_S)


class _Executes(Protocol):
    """A connection of sqlite3 or a cursor of it."""

    def execute(self, sql: str, /) -> Any:
        """Run a statement."""
        ...


def postgres_options(url: str, statement_timeout_s: float | None = None) -> str:
    """Those of the URL, the server's own guard against frozen clients, and how long a statement may take."""
    given = conninfo_to_dict(url).get("options") or ""
    limit = "" if statement_timeout_s is None else f" -c statement_timeout={int(statement_timeout_s * 1000)}ms"
    return f"{given} -c idle_in_transaction_session_timeout={int(FROZEN_AFTER_S * 1000)}ms{limit}".strip()
