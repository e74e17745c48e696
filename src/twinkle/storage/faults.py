"""What an error of a database means: that it is away for now, or that a statement of ours is wrong."""

from __future__ import annotations

import sqlite3

import psycopg
import structlog

from twinkle.core.errors import StatementFailed, StorageUnavailable, TwinkleError

DRIVER_ERRORS = (sqlite3.Error, psycopg.Error)

CALL_ERRORS = (*DRIVER_ERRORS, UnicodeError, OverflowError)
"""The same, where nothing but a driver is called: a value that it cannot send is no error of its own kind."""

_PASSING_SQLITE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
"""Locks, disks that are full or away. The low byte of a code; the others say more of the same."""

_PASSING_CLASSES = ("08", "40", "53", "57", "58")
"""PostgreSQL: the connection, a rollback to break a deadlock, resources, an operator, the server's system."""

_PASSING_STATES = frozenset({"25006", "25P03", "25P04", "55P03", "55006"})
"""A server that only reads (after a fail-over), our own time-out for a frozen process, a lock that is not to be had."""

_NAME_LENGTH = 60

_log = structlog.get_logger()


def fault_of(error: BaseException, *, statement: str) -> TwinkleError:
    """Our own error for a driver's, without what the driver said: that names hosts, users and files, and tenants read.

    Args:
        error: What the driver raised.
        statement: The text of the statement, which holds no values; empty where it was none.

    Returns:
        ``StorageUnavailable`` for what can pass, ``StatementFailed`` for everything else.
    """
    told = " ".join(str(error).split())
    kind = type(error).__name__
    name = statement_name(statement)
    if can_pass(error):
        _log.warning("database.unavailable", error=told, kind=kind, statement=name)
        return StorageUnavailable(f"the journal's database did not answer ({kind})")
    _log.error("database.statement_failed", error=told, kind=kind, statement=statement, exc_info=error)
    return StatementFailed(f"the journal's database refused {name!r} ({kind})", statement=name)


def can_pass(error: BaseException) -> bool:
    """Whether the same statement may succeed later: nothing is wrong with it."""
    if isinstance(error, sqlite3.Error):
        # What the driver says by itself has no code of the database.
        code: int | None = getattr(error, "sqlite_errorcode", None)
        return code is not None and code & 0xFF in _PASSING_SQLITE
    if isinstance(error, psycopg.Error):
        if error.sqlstate is None:
            # No server said so: the connection could not be made, or was cut.
            return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        return error.sqlstate[:2] in _PASSING_CLASSES or error.sqlstate in _PASSING_STATES
    return False


def statement_name(statement: str) -> str:
    """The beginning of a statement, by which it is found in the code."""
    return " ".join(statement.split())[:_NAME_LENGTH].strip() or "a transaction"
