"""Operations as tasks in Celery's event stream: what Flower and any other event consumer sees.

An operation is shown under its kind's name, with the future's id as uuid, a short "tenant, adapter, number" as its
arguments, for the eye, and tenant, adapter, seq and attempt in full as its keyword arguments, for a search. Never data:
no payload, prompt or token is in any event.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import structlog
from celery import Celery
from celery.events import EventDispatcher
from kombu.exceptions import OperationalError

from twinkle.core.errors import TwinkleError
from twinkle.core.operation import Claim, Failure, Outcome

_GATHER_S = 0.1
_CLOSE_TIMEOUT_S = 5.0

_Event: TypeAlias = tuple[str, dict[str, object]]


@dataclass(frozen=True)
class _Begun:
    """Claims that are to be told of: nothing is made of them, or looked up, on the step loop's thread."""

    claims: tuple[Claim, ...]
    timestamp: float


_log = structlog.get_logger()


class OperationReporter:
    """Sends the events of one worker from a thread of its own, those of many batches in one message.

    The step loop never waits for the broker; one that is away costs the events, nothing else.
    """

    def __init__(self, app: Celery, hostname: str, *, name_of_tenant: Callable[[str], str]) -> None:
        """Prepare; nothing is sent before :meth:`start`.

        Args:
            app: The application on whose broker the events go.
            hostname: The Celery node name the operations are attributed to.
            name_of_tenant: From a tenant's id; asked once for each.
        """
        self._app = app
        self._hostname = hostname
        self._name_of_tenant = cache(name_of_tenant)
        self._dispatcher: EventDispatcher | None = None
        self._events: queue.SimpleQueue[_Event | _Begun | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, name="report", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def started(self, claims: Iterable[Claim]) -> None:
        """They were received and have begun."""
        begun = _Begun(tuple(claims), time.time())
        if begun.claims:
            self._events.put(begun)

    def ended(self, outcomes: Iterable[Outcome], started_at: float) -> None:
        """Their outcomes are committed."""
        now = time.time()
        for outcome in outcomes:
            kind, fields = _event_of(outcome, now - started_at)
            self._events.put((kind, {**fields, "timestamp": now}))

    def retried(self, claim: Claim, reason: str) -> None:
        """It will be tried again."""
        fields = {"uuid": claim.request_id, "exception": reason, "traceback": "", "timestamp": time.time()}
        self._events.put(("task-retried", fields))

    def close(self) -> None:
        """Send what is left and disconnect."""
        self._closing.set()
        self._events.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _send_forever(self) -> None:
        is_open = True
        while is_open:
            gathered = [self._events.get()]
            self._closing.wait(_GATHER_S)
            while not self._events.empty():
                gathered.append(self._events.get())
            is_open = None not in gathered
            self._send([event for event in gathered if event is not None])
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _send(self, events: list[_Event | _Begun]) -> None:
        if not events:
            return
        try:
            dispatcher = self._connected()
            for event in events:
                for kind, fields in self._describe(event) if isinstance(event, _Begun) else (event,):
                    dispatcher.send(kind, **fields)
            dispatcher.flush()
        except (OperationalError, OSError, TwinkleError) as error:
            self._dispatcher = None
            _log.warning("report.failed", error=str(error), lost_events=_count(events))
        except Exception as error:  # noqa: BLE001 - the border: one bad event must not end all that are to come
            self._dispatcher = None
            _log.error("report.failed", error=str(error), lost_events=_count(events), exc_info=error)

    def _describe(self, begun: _Begun) -> Iterator[_Event]:
        """Received and started, each of them."""
        for claim in begun.claims:
            tenant = self._name_of_tenant(claim.tenant)
            facts = {"tenant": tenant, "adapter": claim.lane, "seq": claim.seq, "attempt": claim.attempt}
            yield (
                "task-received",
                {
                    "uuid": claim.request_id,
                    "name": claim.kind.task_name,
                    "args": f"{tenant}, {_short(claim.lane)}, {claim.seq}",
                    "kwargs": repr(facts),
                    "retries": claim.attempt - 1,
                    "root_id": claim.request_id,
                    "timestamp": begun.timestamp,
                },
            )
            yield "task-started", {"uuid": claim.request_id, "timestamp": begun.timestamp}

    def _connected(self) -> EventDispatcher:
        if self._dispatcher is None:
            connection = self._app.connection_for_write()
            connection.ensure_connection(max_retries=1, timeout=2)
            self._dispatcher = EventDispatcher(
                connection, hostname=self._hostname, app=self._app, buffer_group={"task"}, buffer_limit=1000
            )
        return self._dispatcher


def _count(events: Iterable[_Event | _Begun]) -> int:
    return sum(2 * len(event.claims) if isinstance(event, _Begun) else 1 for event in events)


def _short(lane: str) -> str:
    """The first part of the session's id, and which of its adapters or sampling sessions it is."""
    session, _, rest = lane.partition(":")
    return f"{session[:8]}:{rest}"


def _event_of(outcome: Outcome, runtime_s: float) -> tuple[str, dict[str, object]]:
    if outcome.failure is None:
        return "task-succeeded", {"uuid": outcome.request_id, "result": "", "runtime": runtime_s}
    return "task-failed", {
        "uuid": outcome.request_id,
        "exception": _public_reason(outcome.failure),
        "traceback": "",
        "runtime": runtime_s,
    }


def _public_reason(failure: Failure) -> str:
    """The kind of failure. The message may quote a request, and every operator reads Flower."""
    return f"{failure.category.value}: {failure.code}"
