"""A transaction of PostgreSQL whose statements travel together: it waits for the server only where it needs an answer.

What is executed is kept until somebody looks at an answer, then sent with everything before it in one journey. So what
begins the transaction goes with its first statements, what ends it with its last ones, and any number of statements
that do not need each other's answers costs one journey. Where one fails, nothing behind it is executed, the commit
neither. Between two journeys the server knows that it waits for us, and ends whoever keeps it waiting with locks held.
Whoever stops on the way is found by :mod:`twinkle.storage.upkeep.frozen`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from twinkle.core.errors import TwinkleError
from twinkle.storage.faults import fault_of


class Statements:
    """The statements of one transaction that is open."""

    def __init__(self, connection: psycopg.Connection[Any], pipeline: psycopg.Pipeline) -> None:
        self._connection = connection
        self._pipeline = pipeline
        self._unsent: list[Answer] = []
        self._sent: list[Answer] = []

    def execute(self, sql: str, parameters: Sequence[object] = (), *, name: str) -> Answer:
        """Have a statement sent with the next journey; ``name`` is the text that an error of it names."""
        answer = Answer(self, sql, tuple(parameters), name)
        self._unsent.append(answer)
        return answer

    def travel(self) -> None:
        """Send what was executed since the last journey, and wait for the answers; raises as :func:`pipelined` does."""
        try:
            self.send()
            # And not by a flush: whoever is asked for that is not known to wait for us, and keeps its locks.
            self._pipeline.sync()
        except psycopg.Error as error:
            raise self.fault(error) from error

    def send(self) -> None:
        """Send it, and leave the answers to the end of the pipeline."""
        self._sent, self._unsent = self._unsent, []
        for answer in self._sent:
            answer.send(self._connection)

    def fault(self, error: psycopg.Error) -> TwinkleError:
        """Our own error for the driver's, which names the statement that it is about."""
        # What the server says it says of the first that it has not answered; the driver would not send one.
        is_of_server = error.sqlstate is not None
        failed = next((each for each in self._sent if not (each.is_there if is_of_server else each.is_sent)), None)
        return fault_of(error, statement="" if failed is None else failed.name)


class Answer:
    """What the server answers to a statement; whoever looks at it waits for it."""

    def __init__(self, statements: Statements, sql: str, parameters: tuple[object, ...], name: str) -> None:
        self.name = name
        self._statements = statements
        self._sql = sql
        self._parameters = parameters
        self._cursor: psycopg.Cursor[Any] | None = None

    @property
    def is_sent(self) -> bool:
        """Whether it is on its way."""
        return self._cursor is not None

    @property
    def is_there(self) -> bool:
        """Whether the server has answered."""
        return self._cursor is not None and self._cursor.pgresult is not None

    def send(self, connection: psycopg.Connection[Any]) -> None:
        """Put the statement on its way.

        Raises:
            StatementFailed: It has a value that the driver cannot send.
        """
        try:
            self._cursor = connection.execute(self._sql, self._parameters)
        except (UnicodeError, OverflowError) as error:
            raise fault_of(error, statement=self.name) from error

    @property
    def rowcount(self) -> int:
        """Rows the statement changed."""
        return self._answered().rowcount

    def fetchone(self) -> Any:
        """The next row."""
        return self._answered().fetchone()

    def fetchall(self) -> list[Any]:
        """All rows left."""
        return self._answered().fetchall()

    def _answered(self) -> psycopg.Cursor[Any]:
        if self._cursor is None:
            self._statements.travel()
        assert self._cursor is not None, "what was executed is sent by the next journey"
        return self._cursor


@contextmanager
def pipelined(connection: psycopg.Connection[Any]) -> Iterator[Statements]:
    """A transaction on a connection in autocommit mode: commits at the end of the block, rolls back when it raises.

    Raises:
        StorageUnavailable: The database did not answer, or broke a deadlock.
        StatementFailed: A statement is wrong.
    """
    statements: Statements | None = None
    try:
        with connection.pipeline() as pipeline:
            statements = Statements(connection, pipeline)
            statements.execute("BEGIN", name="BEGIN")
            yield statements
            statements.execute("COMMIT", name="COMMIT")
            statements.send()
    except BaseException as error:
        _roll_back(connection)
        if isinstance(error, psycopg.Error) and statements is not None:
            raise statements.fault(error) from error
        raise


def _roll_back(connection: psycopg.Connection[Any]) -> None:
    if connection.info.transaction_status is TransactionStatus.IDLE:
        return
    try:
        connection.rollback()
    except psycopg.Error:
        # The server rolls back what its client has left.
        connection.close()
