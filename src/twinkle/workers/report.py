"""Operations as tasks in Celery's event stream: what Flower and any other event consumer sees.

An operation is shown under its kind's name, with the future's id as uuid and tenant, adapter, seq and attempt as its
arguments. Never data: no payload, prompt or token is in any event.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import structlog
from celery import Celery
from celery.events import EventDispatcher
from kombu.exceptions import OperationalError

from twinkle.core.operation import Claim, Failure, Outcome

_log = structlog.get_logger()


class OperationReporter:
    """Sends the events of one worker. Buffered per batch; a broker that is away costs the events, nothing else."""

    def __init__(self, app: Celery, hostname: str) -> None:
        """Connect lazily.

        Args:
            app: The application on whose broker the events go.
            hostname: The Celery node name the operations are attributed to.
        """
        self._app = app
        self._hostname = hostname
        self._dispatcher: EventDispatcher | None = None

    def started(self, claims: Iterable[Claim]) -> None:
        """They were received and have begun."""
        events: list[tuple[str, dict[str, object]]] = []
        for claim in claims:
            facts = {"tenant": claim.tenant, "adapter": claim.lane, "seq": claim.seq, "attempt": claim.attempt}
            received = {
                "uuid": claim.request_id,
                "name": claim.kind.task_name,
                "args": f"({claim.lane}, {claim.seq})",
                "kwargs": repr(facts),
                "retries": claim.attempt - 1,
                "root_id": claim.request_id,
            }
            events += [("task-received", received), ("task-started", {"uuid": claim.request_id})]
        self._send(events)

    def ended(self, outcomes: Iterable[Outcome], started_at: float) -> None:
        """Their outcomes are committed."""
        runtime_s = time.time() - started_at
        self._send([_event_of(outcome, runtime_s) for outcome in outcomes])

    def retried(self, claim: Claim, reason: str) -> None:
        """It will be tried again."""
        self._send([("task-retried", {"uuid": claim.request_id, "exception": reason, "traceback": ""})])

    def close(self) -> None:
        """Send what is left and disconnect."""
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _send(self, events: list[tuple[str, dict[str, object]]]) -> None:
        if not events:
            return
        try:
            dispatcher = self._connected()
            for kind, fields in events:
                dispatcher.send(kind, **fields)
            dispatcher.flush()
        except (OperationalError, OSError) as error:
            self._dispatcher = None
            _log.warning("report.failed", error=str(error), lost_events=len(events))

    def _connected(self) -> EventDispatcher:
        if self._dispatcher is None:
            connection = self._app.connection_for_write()
            connection.ensure_connection(max_retries=1, timeout=2)
            self._dispatcher = EventDispatcher(
                connection, hostname=self._hostname, app=self._app, buffer_group={"task"}, buffer_limit=1000
            )
        return self._dispatcher


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
