"""The one connection of a process to a server of the Twinkle dialect, which all classes of this package use."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from twinkle.client.backoff import RetryPolicy
from twinkle.core.ids import new_id
from twinkle_client.arguments import encode_arguments
from twinkle_client.endpoint import Endpoint
from twinkle_client.errors import BadAnswer, ClientClosed, ConfigError, Expired, NotFound, TwinkleError
from twinkle_client.sending import CALL_TIMEOUT_S, Request, Sender

HEARTBEAT_S = 10.0
WAIT_S = 20
"""How long the server holds a question for an outcome, well within a proxy's patience."""

_ANSWER_MARGIN_S = 30.0
_HEARTBEAT_TIMEOUT_S = 10.0
_FIRST_TIMEOUT_S = 60.0
_ACCEPTED = 202

_log = logging.getLogger(__name__)


class Connection:
    """A session on a server, kept alive while the process lives. Usable from all threads, and after a fork.

    Not every server takes a call twice as one: ours does, and says so when the session is made. Towards others a call
    is only sent again while nothing of it can have arrived.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        heartbeat_interval_s: float = HEARTBEAT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
        policy: RetryPolicy | None = None,
    ) -> None:
        """Connect nothing yet."""
        self.endpoint = endpoint
        self.session_id: str | None = None
        self.call_timeout_s = call_timeout_s
        self._offers: frozenset[str] = frozenset()
        self._heartbeat_interval_s = heartbeat_interval_s
        self._policy = policy
        self._is_closed = threading.Event()
        self._is_lost = False
        self.start_over()
        on_fork(self)
        # The heart holds the connection only while it beats: one that nobody holds is let go, and the heart stops.
        weakref.finalize(self, self._is_closed.set)

    @property
    def is_session_lost(self) -> bool:
        """Whether the server has forgotten the session: it was not heard of for too long, or is a new one."""
        return self._is_lost

    @property
    def has_futures(self) -> bool:
        """Whether the server accepts a call at once and keeps its outcome to be asked for."""
        return "futures" in self._offers

    def open_session(self, metadata: Mapping[str, Any] | None = None) -> str:
        """Make a session and keep it alive from now on; its id. It takes the place of an earlier one."""
        # A server that is not there is said soon; one that goes away later is waited for.
        timeout_s = min(_FIRST_TIMEOUT_S, self.call_timeout_s)
        body = self.ask("POST", self.gateway("/create_session"), {"metadata": metadata}, timeout_s=timeout_s)
        session_id, offers = body.get("session_id"), body.get("offers", ())
        if not isinstance(session_id, str):
            raise BadAnswer(f"{self.endpoint.url}: answered no session_id; is it a server of the Twinkle dialect?")
        self.session_id, self._offers, self._is_lost = session_id, frozenset(offers), False
        self._ready()
        return session_id

    def close(self) -> None:
        """Stop the heartbeats and close all connections. What was accepted goes on at the server."""
        self._is_closed.set()
        self._sender.close()

    def gateway(self, path: str) -> str:
        """The path of a route of the gateway."""
        return self.endpoint.route_prefix + path

    def call(self, path: str, arguments: Mapping[str, object], *, timeout_s: float | None = None) -> Any:
        """Call a method of something at the server, done once however often it is sent; what it answered, as JSON.

        Raises:
            InvalidInput: An argument cannot be sent, or the server refuses it.
            Expired: There is no more of it: an iterator is at its end.
            TimeoutError: The deadline has passed; the server goes on.
            TwinkleError: As :mod:`twinkle_client.errors` has it.
        """
        ends_at = time.monotonic() + (self.call_timeout_s if timeout_s is None else timeout_s)
        accepted = self.submit(path, encode_arguments(arguments), ends_at=ends_at, wait_s=WAIT_S)
        return self.outcome(accepted.request_id, ends_at=ends_at) if accepted.request_id else accepted.answer

    def submit(self, path: str, content: bytes, *, ends_at: float, wait_s: int = 0) -> Accepted:
        """Hand a call over. A server without futures answers when it is done, however long that takes.

        Args:
            path: Where to.
            content: The arguments, as JSON.
            ends_at: When to give up, by the monotonic clock.
            wait_s: How long the answer is waited for at once, before it becomes something to ask for.
        """
        preference = f"respond-async, wait={wait_s}" if wait_s else "respond-async"
        request = Request(
            method="POST",
            path=path,
            content=content,
            headers={
                **self._headers(),
                "content-type": "application/json",
                "x-idempotency-key": new_id(),
                **({"prefer": preference} if self.has_futures else {}),
            },
            may_repeat="idempotency" in self._offers,
            answers_within_s=wait_s + _ANSWER_MARGIN_S if self.has_futures else None,
        )
        response = self._ready().send(request, timeout_s=ends_at - time.monotonic())
        answer = _json(response.content)
        if response.status_code == _ACCEPTED:
            return Accepted(request_id=_request_id(answer))
        return Accepted(answer=answer)

    def outcome(self, request_id: str, *, ends_at: float | None = None) -> Any:
        """What the call of that id has answered, as soon as it has. Blocks.

        Raises:
            TimeoutError: It is not there at ``ends_at``; the server goes on, and it can be asked for again.
        """
        while True:
            left_s = _FOR_EVER_S if ends_at is None else ends_at - time.monotonic()
            is_there, answer = self.look(request_id, wait_s=max(0, min(WAIT_S, round(left_s))))
            if is_there:
                return answer
            if ends_at is not None and time.monotonic() >= ends_at:
                raise TimeoutError(
                    f"{request_id}: not done in time; the server goes on with it, and client.future({request_id!r})"
                    " collects the outcome, in any process"
                )

    def look(self, request_id: str, *, wait_s: int = 0) -> tuple[bool, Any]:
        """Whether a call has its outcome, and which; waits for it as long as is said."""
        request = Request(
            method="GET",
            path=f"{self.gateway('/futures')}/{quote(request_id, safe='')}?wait_s={wait_s}",
            headers=self._headers(),
            answers_within_s=wait_s + _ANSWER_MARGIN_S,
        )
        response = self._ready().send(request, timeout_s=self.call_timeout_s)
        if response.status_code == _ACCEPTED:
            return False, None
        return True, _json(response.content)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """One request that is answered at once and is harmless twice; the JSON object it answers."""
        request = Request(
            method=method,
            path=path,
            content=b"" if body is None else json.dumps(body).encode(),
            headers={**self._headers(), **({} if body is None else {"content-type": "application/json"})},
        )
        timeout_s = self.call_timeout_s if timeout_s is None else timeout_s
        answer = _json(self._ready().send(request, timeout_s=timeout_s).content)
        if not isinstance(answer, dict):
            raise BadAnswer(f"{path}: answered {type(answer).__name__}, not an object; is it a server of this dialect?")
        return answer

    def stream(self, path: str, arguments: Mapping[str, object]) -> AbstractContextManager[httpx.Response]:
        """A call that answers line by line, as a context manager of the response. It is sent once."""
        return self._ready().stream(
            Request(
                method="POST",
                path=path,
                content=encode_arguments(arguments),
                headers={**self._headers(), "content-type": "application/json", "x-idempotency-key": new_id()},
            ),
            timeout_s=self.call_timeout_s,
        )

    def _headers(self) -> dict[str, str]:
        return {} if self.session_id is None else {"X-Twinkle-Session-Id": self.session_id}

    def start_over(self) -> None:
        """Have connections and a heart of this process; those of the one it was forked from are left to it."""
        self._lock = threading.Lock()
        self._heart: threading.Thread | None = None
        self._sender = Sender(self.endpoint.url, self.endpoint.headers(), policy=self._policy)

    def _ready(self) -> Sender:
        """The connections, with a heart that beats beside them."""
        if self._is_closed.is_set():
            raise ClientClosed("the connection is closed; call init_twinkle_client again")
        with self._lock:
            if self._heart is None and self.session_id is not None:
                self._heart = threading.Thread(
                    target=_beat,
                    args=(weakref.ref(self), self._is_closed, self._heartbeat_interval_s),
                    name="twinkle-heartbeat",
                    daemon=True,
                )
                self._heart.start()
        return self._sender

    def beat(self) -> None:
        """Tell the server that this process lives; says so when the session is lost, and no more from then on."""
        session_id = self.session_id
        if self._is_lost or session_id is None:
            return
        request = Request(
            method="POST",
            path=self.gateway("/session_heartbeat"),
            content=json.dumps({"session_id": session_id}).encode(),
            headers={**self._headers(), "content-type": "application/json"},
        )
        try:
            self._sender.send(request, timeout_s=_HEARTBEAT_TIMEOUT_S)
        except (NotFound, Expired) as error:
            self._is_lost = session_id == self.session_id
            _log.error(
                "session %s is lost: %s; what was saved is kept, call init_twinkle_client() again and load it",
                session_id,
                error,
            )
        except (TwinkleError, TimeoutError) as error:
            if not self._is_closed.is_set():
                _log.warning("heartbeat of session %s failed: %s; it is tried again", session_id, error)


class Accepted:
    """A call that was handed over: its id if the outcome is to be asked for, else what it answered."""

    def __init__(self, *, request_id: str = "", answer: Any = None) -> None:
        self.request_id = request_id
        self.answer = answer


class _Current:
    """The connection that all classes use. Scripts know one server, and say once which."""

    def __init__(self) -> None:
        self.connection: Connection | None = None


_FOR_EVER_S = 1e9
_current = _Current()


class StartsOver(Protocol):
    """What a fork leaves without its threads."""

    def start_over(self) -> None:
        """Begin anew in the new process."""


_forked: weakref.WeakSet[StartsOver] = weakref.WeakSet()


def on_fork(thing: StartsOver) -> None:
    """Have it start over in every process that is forked from this one, as long as it is there."""
    _forked.add(thing)


def current() -> Connection:
    """The connection of this process.

    Raises:
        ConfigError: Nobody has called ``init_twinkle_client``.
    """
    if _current.connection is None:
        raise ConfigError(
            "no server is known: call twinkle_client.init_twinkle_client(base_url=..., api_key=...) first"
        )
    return _current.connection


def use(connection: Connection) -> None:
    """Make it the connection of this process; the one before keeps serving the objects that were made with it."""
    _current.connection = connection


def _beat(connection: weakref.ref[Connection], is_closed: threading.Event, interval_s: float) -> None:
    while not is_closed.wait(interval_s):
        held = connection()
        if held is None:
            return
        held.beat()
        del held


def _after_fork() -> None:
    for thing in list(_forked):
        thing.start_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        raise BadAnswer("the answer is no JSON; what answered is no server of the Twinkle dialect") from None


def _request_id(answer: Any) -> str:
    request_id = answer.get("request_id") if isinstance(answer, dict) else None
    if not isinstance(request_id, str) or not request_id:
        raise BadAnswer("the call was accepted without a request_id; its outcome cannot be asked for")
    return request_id
