"""The claim ticket of one operation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from twinkle.client.errors import Cancelled
from twinkle.client.promise import Promise
from twinkle.wire.bodies.native import StandingResponse

T = TypeVar("T")


class Future(Promise[T]):
    """One operation's outcome: ``await`` it, or ``result()`` it from any thread.

    It exists before the operation was sent. Once it is accepted it has a ``request_id``, with which any process that
    holds the tenant's key can collect the outcome, whatever happens to this one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ask_status: Callable[[Future[T]], Promise[StandingResponse]],
        ask_to_cancel: Callable[[Future[T]], None] | None = None,
    ) -> None:
        """Make the ticket of an operation that is still to be sent.

        Args:
            loop: The loop of the client that sends it.
            ask_status: Asks the server where it stands.
            ask_to_cancel: Tells the server that nobody wants the outcome; absent where it cannot be told.
        """
        super().__init__(loop)
        self._ask_status = ask_status
        self._accepted: Promise[str] = Promise(loop)
        self._ask_to_cancel = ask_to_cancel
        self._lock = threading.Lock()
        self._was_begun = False

    def __repr__(self) -> str:
        state = "done" if self.done() else "accepted" if self._accepted.done() else "not yet accepted"
        return f"<Future {self.request_id or ''} {state}>"

    @property
    def request_id(self) -> str | None:
        """The server's name for it, once it is accepted."""
        return self._accepted.result() if self._accepted.done() and not self._accepted.exception() else None

    def accepted(self) -> Promise[str]:
        """The ``request_id``, as soon as the operation is in the server's journal: from then on nothing loses it.

        It fails with the error that this future fails with when the operation never gets there.
        """
        return self._accepted

    def status(self) -> Promise[StandingResponse]:
        """Where the operation stands, once it is accepted: its place in line, why it waits, when it may start.

        ``reason`` is a ``WaitReason``, ``text`` says it in a sentence; ``place``, ``starts_in_s``, ``attempt`` of
        ``max_attempts``, ``last_error`` and ``next_try_at`` (Unix seconds) are there when they are known. Raises
        ``ClientClosed`` when the client is closed.
        """
        return self._ask_status(self)

    def cancel(self) -> bool:
        """Say that the outcome is not wanted; whether that can still have an effect. Does not block.

        An operation that was not sent yet is dropped. For an accepted sample the server is asked, and ends it unless it
        is faster. An accepted training operation stays: later ones build on it.
        """
        with self._lock:
            if not self._was_begun:
                self._was_begun = True
                is_unsent = True
            else:
                is_unsent = False
        if is_unsent:
            self.set_exception(Cancelled("cancelled before it was sent"))
            return True
        if self.done() or self._ask_to_cancel is None:
            return False
        self._ask_to_cancel(self)
        return True

    def begin(self) -> bool:
        """For who sends it: whether it may be sent, being neither cancelled nor begun already."""
        with self._lock:
            is_free = not self._was_begun
            self._was_begun = True
        return is_free

    def set_accepted(self, request_id: str) -> None:
        """For who sent it: it is in the journal."""
        self._accepted.set_result(request_id)

    def set_exception(self, error: BaseException) -> None:
        """For who made it: it failed, and if it was not accepted by now it never was."""
        self._accepted.set_exception(error)
        super().set_exception(error)
