"""A SQLAlchemy engine on the journal's database, for what migrates it. Everything else asks ``database.py``."""

from __future__ import annotations

import sqlite3

import psycopg
from sqlalchemy import Engine, ExceptionContext, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from twinkle.storage.database import BUSY_TIMEOUT_S, apply_pragmas, postgres_options
from twinkle.storage.faults import CALL_ERRORS, fault_of


def sql_engine(url: str) -> Engine:
    """An engine that connects when it is first asked; its errors are ours, but for broken constraints."""
    if not url.startswith("sqlite"):
        scheme_free = url.split("://", 1)[1]
        engine = create_engine(
            f"postgresql+psycopg://{scheme_free}",
            pool_pre_ping=True,
            connect_args={"options": postgres_options(url)},
        )
        event.listen(engine, "handle_error", _translate_error)
        return engine
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "handle_error", _translate_error)

    @event.listens_for(engine, "connect")
    def _set_pragmas(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        apply_pragmas(cursor)
        cursor.close()

    return engine


def _translate_error(context: ExceptionContext) -> None:
    """Raise our own error, except where SQLAlchemy is about to reconnect, and for broken constraints."""
    error = context.original_exception
    if context.is_pre_ping or isinstance(error, sqlite3.IntegrityError | psycopg.IntegrityError):
        return
    if isinstance(error, CALL_ERRORS):
        raise fault_of(error, statement=context.statement or "") from error
