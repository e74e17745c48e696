"""Jobs on Celery: messages that say which one may be run, and the events by which monitors see each attempt.

The journal knows which jobs there are and who runs them. A message that is lost comes again, and one that comes twice
finds the job taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from twinkle.core.errors import StorageUnavailable
from twinkle.core.job import Job, JobKind, JobState
from twinkle.storage.jobs.turns import ReadyJob
from twinkle.storage.jobs.waiting import RUNNER_LOST, WaitingJobs

JOBS_QUEUE = "jobs"

_MAX_MESSAGES = 16
"""On the queue at once: enough for every worker to find one, few enough for who comes next to be decided late."""
_AGAIN_AFTER_S = 10.0
_SOCKET_TIMEOUT_S = 5.0

_log = structlog.get_logger()


def task_name(kind: JobKind) -> str:
    """The name under which Celery and its monitors know this kind of job."""
    return f"twinkle.job.{kind.value}"


def task_id(job: str, attempt: int) -> str:
    """One task for each attempt."""
    return f"{job}:{attempt}"


class JobDispatcher:
    """Sends a message for each job that may begin, the tenants in turn."""

    def __init__(self, app: Celery, waiting: WaitingJobs, redis_url: str) -> None:
        self._app = app
        self._waiting = waiting
        self._redis = redis.Redis.from_url(redis_url, socket_timeout=_SOCKET_TIMEOUT_S)

    def dispatch(self) -> int:
        """Let those begin whose needs have ended, and hand out what may be run; how many. Blocks.

        Raises:
            StorageUnavailable: The journal did not answer.
        """
        self._waiting.settle()
        try:
            room = _MAX_MESSAGES - int(self._redis.llen(JOBS_QUEUE))
        except redis.RedisError as error:
            _log.warning("jobs.not_handed_out", error=str(error), next="the sweep tries again")
            return 0
        ready = self._waiting.take_ready(limit=room, again_after_s=_AGAIN_AFTER_S) if room > 0 else []
        for number, job in enumerate(ready):
            try:
                self._send(job)
            except (OperationalError, OSError, redis.RedisError) as error:
                self._waiting.put_back([left.id for left in ready[number:]])
                _log.warning("jobs.not_handed_out", error=str(error), next="the sweep tries again")
                return number
        return len(ready)

    def _send(self, job: ReadyJob) -> None:
        facts = {"job": job.id, "tenant": job.tenant, "kind": job.kind.value, "attempt": job.attempt}
        self._app.send_task(
            task_name(job.kind),
            queue=JOBS_QUEUE,
            task_id=task_id(job.id, job.attempt),
            kwargs={**facts, "reason": job.reason},
            retry=False,
        )


class JobBell:
    """Dispatches from a thread of its own when it is rung, so that no request waits for the broker."""

    def __init__(self, dispatcher: JobDispatcher) -> None:
        self._dispatcher = dispatcher
        self._rung = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="job-bell", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def ring(self) -> None:
        """Some job may be ready. Returns at once and never raises."""
        self._rung.set()

    def stop(self) -> None:
        """End. What is ready is found by the sweep."""
        self._is_stopping = True
        self._rung.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._rung.wait()
            self._rung.clear()
            if self._is_stopping:
                return
            try:
                self._dispatcher.dispatch()
            except StorageUnavailable as error:
                _log.warning("jobs.not_handed_out", error=error.message, next="the sweep tries again")
            except Exception as error:  # noqa: BLE001 - the border: whatever one look meets, the next ring must work
                _log.error("jobs.not_handed_out", error=str(error), next="the sweep tries again", exc_info=error)


def register_jobs(
    app: Celery, run: Callable[[str, AttemptReporter], None], *, name_of_tenant: Callable[[str], str]
) -> None:
    """Make ``run`` what the application does with a job's message, for every kind.

    A message is acknowledged before the work and shown to no monitor: one that came twice would be seen as an attempt
    that ended at once. What is shown is the attempt itself, once it has begun.
    """
    for kind in JobKind:

        def attempt(job: str, reason: str = "", **_: Any) -> None:
            run(job, AttemptReporter(app, reason=reason, name_of_tenant=name_of_tenant))

        app.task(name=task_name(kind), shared=False, acks_late=False, ignore_result=True, send_events=False)(attempt)


@dataclass(frozen=True)
class AttemptReporter:
    """Shows one attempt in Celery's event stream, under its kind's name. A broker that is away costs the events."""

    app: Celery
    reason: str
    name_of_tenant: Callable[[str], str]

    def began(self, job: Job) -> None:
        """It was claimed. Of the attempt before it nobody else can tell if its runner was lost."""
        if self.reason == RUNNER_LOST:
            before = task_id(job.id, job.attempt - 1)
            self._send(before, ("task-failed", {"exception": RUNNER_LOST, "traceback": "", "runtime": 0.0}))
        try:
            tenant = self.name_of_tenant(job.tenant)
        except StorageUnavailable as error:
            _log.warning("report.nameless", job=job.id, error=error.message, next="its tenant's id is shown")
            tenant = job.tenant
        facts = {"job": job.id, "tenant": tenant, "kind": job.kind.value, "attempt": job.attempt, "reason": self.reason}
        uuid = task_id(job.id, job.attempt)
        received = {
            "name": task_name(job.kind),
            "args": f"{tenant}, {job.name or job.id[:8]}",
            "kwargs": repr(facts),
            "retries": job.attempt - 1,
            "root_id": uuid,
        }
        self._send(uuid, ("task-received", received), ("task-started", {}))

    def left(self, job: Job, runtime_s: float) -> None:
        """It ended, or its job was given back."""
        if job.state is JobState.SUCCEEDED:
            event = ("task-succeeded", {"result": "", "runtime": runtime_s})
        elif job.state is JobState.CANCELLED:
            event = ("task-revoked", {"terminated": False, "signum": None, "expired": False})
        elif job.state is JobState.FAILED:
            # The message may quote what the tenant has sent, and every operator reads Flower.
            code = "" if job.failure is None else job.failure.code
            event = ("task-failed", {"exception": code, "traceback": "", "runtime": runtime_s})
        else:
            event = ("task-retried", {"exception": job.state.value, "traceback": ""})
        self._send(task_id(job.id, job.attempt), event)

    def _send(self, uuid: str, *events: tuple[str, dict[str, Any]]) -> None:
        try:
            with self.app.events.default_dispatcher() as dispatcher:
                for kind, fields in events:
                    dispatcher.send(kind, uuid=uuid, **fields)
        except (OperationalError, OSError, redis.RedisError) as error:
            _log.warning("report.failed", error=str(error), lost_events=len(events))
