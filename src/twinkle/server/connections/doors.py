"""The server's door: how many connections may be open, how long a head may be, and how long it may take to come.

A client that is nobody yet costs a connection and what it has sent. Connections without a request in progress are idle;
the longest idle one makes room when there are too many. What lies between a client and this server, a proxy, may be
stricter; this holds without one.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from dataclasses import dataclass
from typing import cast

import structlog
import uvicorn
from starlette.types import Scope

from twinkle.core.settings import Settings
from twinkle.server.answering.turns import name_flow
from twinkle.server.connections.free_memory import FreedMemory
from twinkle.server.connections.gathering import GatheringTransport, WholeResponses

_RESERVED_FILES = 256
"""Of the files that the process may open: for databases, logs, objects, and for saying no."""
_SAID_EVERY_S = 10.0
_CONNECTION_BYTES = 16 * 2**10
"""What one that has ended counts as: some kilobytes, which the allocator keeps between what lives on."""

_log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class DoorLimits:
    """What a connection may be. Of the settings, but for the connections, which open files bound too."""

    max_connections: int
    max_per_address: int
    max_url_bytes: int
    max_head_bytes: int
    head_timeout_s: float
    send_timeout_s: float

    @classmethod
    def of(cls, settings: Settings) -> DoorLimits:
        """Those of the settings, as far as this process may open files."""
        may_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = settings.max_connections
        if may_open != resource.RLIM_INFINITY:
            most = max(min(most, may_open - _RESERVED_FILES), 1)
        return cls(
            max_connections=most,
            max_per_address=settings.max_connections_per_address or most,
            max_url_bytes=settings.max_url_bytes,
            max_head_bytes=settings.max_head_bytes,
            head_timeout_s=settings.head_timeout_s,
            send_timeout_s=settings.send_timeout_s,
        )


class Door:
    """Who is in. Lives on one event loop."""

    def __init__(self, limits: DoorLimits, freed: FreedMemory) -> None:
        self.limits = limits
        self._freed = freed
        self._of_address: Counter[str] = Counter()
        # In the order in which they became idle: a dictionary keeps it.
        self._idle: dict[GuardedProtocol, None] = {}
        self._num_open = 0
        self.num_turned_away = 0
        """Connections that found no room, and those that made it for others."""
        self._said_at = float("-inf")

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return self._num_open

    def enter(self, one: GuardedProtocol) -> bool:
        """Count one more connection; false when there is no room for it, though idle ones were ended."""
        self._num_open += 1
        self._of_address[one.address] += 1
        if self._of_address[one.address] > self.limits.max_per_address:
            return self._make_room(one.address)
        return self._num_open <= self.limits.max_connections or self._make_room(None)

    def leave(self, one: GuardedProtocol) -> None:
        """Count one less."""
        self._num_open -= 1
        self._of_address[one.address] -= 1
        if not self._of_address[one.address]:
            del self._of_address[one.address]
        self._idle.pop(one, None)
        self._freed.note(_CONNECTION_BYTES)

    def rest(self, one: GuardedProtocol) -> None:
        """It has no request in progress from now on."""
        self._idle.pop(one, None)
        self._idle[one] = None

    def work(self, one: GuardedProtocol) -> None:
        """It has one."""
        self._idle.pop(one, None)

    def _make_room(self, address: str | None) -> bool:
        """End the longest idle connection, of an address if one is named."""
        self.num_turned_away += 1
        now = asyncio.get_running_loop().time()
        if now - self._said_at > _SAID_EVERY_S:
            self._said_at = now
            _log.warning(
                "api.connections_full",
                open=self._num_open,
                address=address or "all",
                next="the longest idle connection ends for each new one",
            )
        longest = next((one for one in self._idle if address in (None, one.address)), None)
        if longest is None:
            return False
        self._idle.pop(longest)
        longest.transport.close()
        return True


class DoorConfig(uvicorn.Config):
    """uvicorn's, with the door that its connections come through."""

    door: Door


class GuardedProtocol(WholeResponses):
    """A connection within the door's limits."""

    address: str = ""
    _is_in = False
    _refusal: bytes = b""
    _num_unseen = 0
    """Bytes since the parser last told something: of a head, a trailer or a chunk's size that does not end."""
    _num_head = 0
    _num_headers = 0
    _awaited: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _num_unsent = 0
    # The door's, kept here: asked of every piece.
    _max_head_bytes = 0

    @property
    def door(self) -> Door:
        """What it came through."""
        assert isinstance(self.config, DoorConfig)
        return self.config.door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Come in, or be told that there is no room."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._max_head_bytes = self.door.limits.max_head_bytes
        self._is_in = True
        if not self.door.enter(self):
            self._refuse(503, b"the server has no room for more connections; come again in a moment", 1)
            return
        self.door.rest(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room."""
        if self._is_in:
            self._is_in = False
            self.door.leave(self)
        self._forget(self._awaited)
        self._forget(self._sending)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Judge how much comes before anything is complete."""
        self._num_unseen += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._awaited is None and not self._is_busy:
            self._await_head()
        if self._num_unseen and (self._is_too_long_a_head() or self._num_unseen > self._max_head_bytes):
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._num_unseen, self._num_head, self._num_headers = 0, 0, 0
        super().on_message_begin()
        name_flow(cast(Scope, self.scope), self.flow)

    def on_url(self, url: bytes) -> None:
        """A piece of the path and query."""
        if len(self.url) + len(url) > self.door.limits.max_url_bytes:
            limit = self.door.limits.max_url_bytes
            self._refusal = _answer(414, b"the path and query of a request have at most %d bytes" % limit)
            raise ValueError("too long a URL")
        super().on_url(url)

    def on_headers_complete(self) -> None:
        """The request is there, but for its body."""
        self._judge_head()
        self._num_unseen = 0
        self._forget(self._awaited)
        self._awaited = None
        self.door.work(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._num_unseen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is whole, and the trailers behind it."""
        self._judge_head()
        self._num_unseen = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is on its way."""
        if self._is_in:
            self.door.rest(self)
        super().on_response_complete()
        if self._is_busy and self._is_in:
            self.door.work(self)

    def send_400_response(self, msg: str) -> None:
        """Say what was wrong."""
        if not self._refusal:
            super().send_400_response(msg)
            return
        self.transport.write(self._refusal)
        self.transport.close()

    def pause_writing(self) -> None:
        """The client reads slower than it is sent to: look now and then whether it reads at all."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        """It has read."""
        self._forget(self._sending)
        self._sending = None
        super().resume_writing()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._awaited = self.loop.call_later(self.door.limits.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._awaited = None
        if not self._is_busy and not self.transport.is_closing():
            self._refuse(408, b"the request's head did not come in time")

    def _watch_sending(self) -> None:
        self._forget(self._sending)
        self._num_unsent = self._unsent()
        self._sending = self.loop.call_later(self.door.limits.send_timeout_s, self._judge_sending)

    def _judge_sending(self) -> None:
        self._sending = None
        if self.transport.is_closing() or self._unsent() >= self._num_unsent:
            self.transport.abort()
        else:
            self._watch_sending()

    def _unsent(self) -> int:
        assert isinstance(self.transport, GatheringTransport)
        return self.transport.get_write_buffer_size()

    def _is_too_long_a_head(self) -> bool:
        """Look at the headers, or trailers, that were told since the last look."""
        new = (self.headers or [])[self._num_headers :]
        if new:
            self._num_unseen = 0
            self._num_headers += len(new)
            self._num_head += sum(len(name) + len(value) for name, value in new)
        return self._num_head > self._max_head_bytes

    def _judge_head(self) -> None:
        """End the parser's work if there is too much of it."""
        if self._is_too_long_a_head():
            self._refusal = self._too_long_a_head()
            raise ValueError("too long a head")

    def _refuse_head(self) -> None:
        self._refusal = self._too_long_a_head()
        self.send_400_response("")

    def _too_long_a_head(self) -> bytes:
        return _answer(431, b"the headers of a request have at most %d bytes" % self._max_head_bytes)

    def _refuse(self, status: int, words: bytes, retry_after_s: int | None = None) -> None:
        self._refusal = _answer(status, words, retry_after_s)
        self.send_400_response("")

    @staticmethod
    def _forget(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


_PHRASES = {
    408: (b"Request Timeout", b"timeout"),
    414: (b"URI Too Long", b"too_long"),
    431: (b"Request Header Fields Too Large", b"too_long"),
    503: (b"Service Unavailable", b"overloaded"),
}


def _answer(status: int, detail: bytes, retry_after_s: int | None = None) -> bytes:
    """A refusal in the one form, of a request that never became one."""
    phrase, code = _PHRASES[status]
    body = b'{"detail":"%s","code":"%s"}' % (detail, code)
    head = [
        b"HTTP/1.1 %d %s" % (status, phrase),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *([] if retry_after_s is None else [b"retry-after: %d" % retry_after_s]),
        b"connection: close",
    ]
    return b"\r\n".join([*head, b"", body])
