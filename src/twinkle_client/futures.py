"""Calls that are handed over one after the other, and waited for later or never."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from twinkle_client.arguments import encode_arguments
from twinkle_client.connection import WAIT_S, Accepted, Connection, on_fork
from twinkle_client.errors import CallFailed, ClientClosed, RunClosed, UserError

P = ParamSpec("P")
T = TypeVar("T")
CallsT = TypeVar("CallsT")

_SIDE_BY_SIDE = 32

HandOver = Callable[[str, Mapping[str, object], Callable[[Any], Any]], "CallFuture[Any]"]
"""How a call leaves: of a :class:`Lane`, ``submit`` or ``send``."""


@dataclass(frozen=True)
class _Outcome:
    answer: Any = None
    error: BaseException | None = None


class CallFuture(Generic[T]):
    """One call's outcome: ``result()`` it from any thread, or ``await`` it.

    It exists before the call was sent. Where the server keeps outcomes it has a ``request_id`` once it is accepted,
    with which any process that holds the key collects the outcome (``client.future(request_id)``). Nothing is asked for
    before somebody wants to know, so a thousand open futures cost nothing.
    """

    def __init__(
        self, connection: Connection, read: Callable[[Any], T], *, note_seen: Callable[[], None] = lambda: None
    ) -> None:
        """Make the ticket of a call that is still to be sent.

        Args:
            connection: It goes over.
            read: Makes a value of what it answers.
            note_seen: Is called when somebody learns that it could not be handed over.
        """
        self._connection = connection
        self._read = read
        self._note_seen = note_seen
        self._is_handed_over = threading.Event()
        self._request_id: str | None = None
        self._outcome: _Outcome | None = None

    def __repr__(self) -> str:
        state = "done" if self._outcome else "accepted" if self._is_handed_over.is_set() else "not yet accepted"
        return f"<CallFuture {self._request_id or ''} {state}>"

    @property
    def request_id(self) -> str | None:
        """The server's name for it, once it is accepted; None where the server keeps no outcomes."""
        return self._request_id

    def accepted(self, timeout: float | None = None) -> str | None:
        """Wait until the server has it; its ``request_id``. From then on nothing loses it.

        Raises:
            TimeoutError: It is not there after ``timeout`` seconds, and goes on being sent.
            TwinkleError: It could not be handed over.
        """
        if not self._is_handed_over.wait(timeout):
            raise TimeoutError("the call is not handed over yet; it goes on being sent")
        outcome = self._outcome
        if self._request_id is None and outcome is not None and outcome.error is not None:
            self._note_seen()
            raise outcome.error
        return self._request_id

    def done(self) -> bool:
        """Whether the outcome is there; asks the server, and does not wait for it."""
        if self._outcome is None and self._request_id is not None:
            self._settle(lambda request_id: self._connection.look(request_id))
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the outcome, at most ``timeout`` seconds. Blocks.

        Raises:
            TimeoutError: The time is up; the call goes on.
            TwinkleError: The call was refused or failed, or the server could not be asked.
        """
        ends_at = None if timeout is None else time.monotonic() + timeout
        self.accepted(timeout)
        self._settle(lambda request_id: (True, self._connection.outcome(request_id, ends_at=ends_at)))
        assert self._outcome is not None
        if self._outcome.error is not None:
            raise self._outcome.error
        return self._read(self._outcome.answer)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, for the error the call ended in, or None when there is a value."""
        try:
            self.result(timeout)
        except Exception:
            if self._outcome is None:
                raise
            return self._outcome.error
        return None

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop, which goes on meanwhile. Cancelling the wait cancels nothing else."""
        return asyncio.to_thread(self.result).__await__()

    def set_accepted(self, accepted: Accepted) -> None:
        """For who sent it: the server has it, and may have answered it already."""
        if accepted.request_id:
            self._request_id = accepted.request_id
        else:
            self._outcome = _Outcome(answer=accepted.answer)
        self._is_handed_over.set()

    def set_error(self, error: BaseException) -> None:
        """For who sent it: it could not be handed over."""
        self._outcome = _Outcome(error=error)
        self._is_handed_over.set()

    def _settle(self, ask: Callable[[str], tuple[bool, Any]]) -> None:
        """Know the outcome for good, if it is there. What may be otherwise the next time is raised and forgotten."""
        if self._outcome is not None or self._request_id is None:
            return
        try:
            is_there, answer = ask(self._request_id)
        except ClientClosed:
            raise
        except (UserError, CallFailed) as error:
            self._outcome = _Outcome(error=error)
            return
        if is_there:
            self._outcome = _Outcome(answer=answer)


@dataclass(frozen=True)
class _Unsent:
    path: str
    content: bytes
    future: CallFuture[Any]


class Lane:
    """The calls of one object, in the order in which they were made, whichever thread made them.

    A call that cannot be handed over takes those after it with it, until somebody has learnt of it: what was meant to
    come after a pass must not be applied without it.
    """

    def __init__(self, connection: Connection, *, fails_together: bool = True) -> None:
        """Send nothing yet; calls that do not build on each other need not fail together."""
        self.connection = connection
        self._fails_together = fails_together
        self._unsent: deque[_Unsent] = deque()
        self.start_over()
        on_fork(self)

    def start_over(self) -> None:
        """Begin anew in a forked process: what was under way is the business of the one it came from."""
        self._lock = threading.Lock()
        self._is_sending = False
        self._closed_by: BaseException | None = None
        left, self._unsent = self._unsent, deque()
        for unsent in left:
            unsent.future.set_error(ClientClosed("the process that this one was forked from sends the call"))

    def submit(self, path: str, arguments: Mapping[str, object], read: Callable[[Any], T]) -> CallFuture[T]:
        """Hand a call over when its turn comes. Returns at once; raises ``InvalidInput`` for what cannot be sent."""
        content = encode_arguments(arguments)
        future = CallFuture(self.connection, read, note_seen=self._open_again)
        with self._lock:
            if self._closed_by is not None:
                future.set_error(_not_sent(self._closed_by))
                return future
            self._unsent.append(_Unsent(path, content, future))
            self._start_sending()
        return future

    def send(self, path: str, arguments: Mapping[str, object], read: Callable[[Any], T]) -> CallFuture[T]:
        """The same in this thread, unless others are waiting for their turn: for who waits for the outcome at once.

        Raises:
            TwinkleError: It could not be handed over.
        """
        with self._lock:
            is_free = not self._is_sending and self._closed_by is None
            self._is_sending = self._is_sending or is_free
        if not is_free:
            return self.submit(path, arguments, read)
        future = CallFuture(self.connection, read)
        try:
            ends_at = time.monotonic() + self.connection.call_timeout_s
            future.set_accepted(
                self.connection.submit(path, encode_arguments(arguments), ends_at=ends_at, wait_s=WAIT_S)
            )
        finally:
            with self._lock:
                self._is_sending = False
                self._start_sending()
        return future

    def _start_sending(self) -> None:
        if self._unsent and not self._is_sending:
            self._is_sending = True
            # Not a daemon: a script that ends has its calls handed over first.
            threading.Thread(target=self._send_all, name="twinkle-calls").start()

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._is_sending = False
                    return
                unsent = self._unsent.popleft()
            try:
                ends_at = time.monotonic() + self.connection.call_timeout_s
                accepted = self.connection.submit(unsent.path, unsent.content, ends_at=ends_at)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the call's outcome
                self._close(unsent, error)
            else:
                unsent.future.set_accepted(accepted)

    def _close(self, unsent: _Unsent, error: BaseException) -> None:
        if not self._fails_together:
            unsent.future.set_error(error)
            return
        with self._lock:
            self._closed_by = error
            left, self._unsent = self._unsent, deque()
        unsent.future.set_error(error)
        for later in left:
            later.future.set_error(_not_sent(error))

    def _open_again(self) -> None:
        with self._lock:
            self._closed_by = None


class Crowd:
    """Calls that have nothing to do with each other: handed over side by side, a few dozen at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lanes = itertools.cycle([Lane(connection, fails_together=False) for _ in range(_SIDE_BY_SIDE)])

    def submit(self, path: str, arguments: Mapping[str, object], read: Callable[[Any], T]) -> CallFuture[T]:
        """As that of a :class:`Lane`."""
        return next(self._lanes).submit(path, arguments, read)

    def send(self, path: str, arguments: Mapping[str, object], read: Callable[[Any], T]) -> CallFuture[T]:
        """As that of a :class:`Lane`, in whichever thread calls it."""
        return Lane(self._connection).send(path, arguments, read)


class Remote(Generic[CallsT]):
    """Something at a server, whose calls may be waited for or not."""

    def __init__(self, connection: Connection, *, submit: CallsT, here: CallsT) -> None:
        self.connection = connection
        self.submit = submit
        """The same calls, handed over in their order and not waited for: each gives a :class:`CallFuture`."""
        self.here = here
        """The calls that the blocking ones wait for."""


def blocking(
    method: Callable[Concatenate[CallsT, P], CallFuture[T]],
) -> Callable[Concatenate[Remote[CallsT], P], T]:
    """The same call, whose outcome is waited for as long as a call may take."""

    @functools.wraps(method)
    def call(remote: Remote[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(remote.here, *args, **kwargs).result(remote.connection.call_timeout_s)

    return call


def _not_sent(error: BaseException) -> RunClosed:
    return RunClosed(f"not sent, as an earlier call could not be handed over: {error}")
