"""A run's operations on their way to the server: one at a time, in the order of the calls, numbered as they go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twinkle.client.connection import Connection
from twinkle.client.errors import ClientClosed, RunClosed
from twinkle.client.future import Future
from twinkle.client.transport import Request


@dataclass(frozen=True)
class Operation:
    """What is to be sent once its number is known: ``write`` makes the request of the number."""

    write: Callable[[int], Request]
    future: Future[Any]


class OperationQueue:
    """Hands a run's operations over. Only :meth:`put` is for other threads.

    A number is given to an operation when its turn comes and is used up when the server has it, so a cancelled or
    refused operation leaves no hole. One whose fate is unknown, or that is refused, closes the queue: what was meant to
    come after it must not be applied without it.
    """

    def __init__(self, connection: Connection, run_id: str, *, next_seq: int) -> None:
        self._connection = connection
        self._run_id = run_id
        self._next_seq = next_seq
        self._unsent: deque[Operation] = deque()
        self._is_sending = False
        self._closed_by: Exception | None = None

    def put(self, write: Callable[[int], Request]) -> Future[Any]:
        """Queue an operation and return at once. Callable from any thread.

        Raises:
            ClientClosed: The client is closed.
        """
        operation = Operation(write, self._connection.new_future())
        self._connection.call_soon(self._arrive, operation)
        return operation.future

    def _arrive(self, operation: Operation) -> None:
        self._unsent.append(operation)
        self._connection.note_unsent(1)
        if not self._is_sending:
            self._is_sending = True
            self._connection.spawn(self._send_all())

    async def _send_all(self) -> None:
        try:
            while self._unsent:
                operation = self._unsent[0]
                if operation.future.begin():
                    await self._send(operation)
                self._forget_first()
        finally:
            self._is_sending = False
            while self._unsent:
                self._unsent[0].future.set_exception(ClientClosed("closed before this operation was accepted"))
                self._forget_first()

    async def _send(self, operation: Operation) -> None:
        if self._closed_by is not None:
            operation.future.set_exception(
                RunClosed(
                    f"{self._run_id}: not sent, as an earlier operation could not be handed over ({self._closed_by});"
                    " attach() to the run again to go on from what was accepted"
                )
            )
            return
        try:
            await self._connection.submit(operation.write(self._next_seq), operation.future)
        except Exception as error:  # noqa: BLE001 - the border: whoever waits hears of it, or would wait for ever
            self._closed_by = error
            operation.future.set_exception(error)
            return
        self._next_seq += 1

    def _forget_first(self) -> None:
        self._unsent.popleft()
        self._connection.note_unsent(-1)
