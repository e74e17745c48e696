"""Pushes of checkpoints by themselves: for each that is saved where that is wanted, an export of its owner's."""

from __future__ import annotations

import hashlib
import json

import structlog

from twinkle.core.errors import Conflict, LimitReached
from twinkle.core.ids import new_id
from twinkle.core.job import JobKind, NewJob
from twinkle.storage.checkpoints.pushes import DuePush, Pushes
from twinkle.storage.jobs.jobs import Jobs

_MAX_ATTEMPTS = 8
_LONGEST_NAME = 512

_log = structlog.get_logger()


class CheckpointPusher:
    """Submits what is due. Whoever does so twice, or half, submits the same jobs: a job is named by its content."""

    def __init__(self, pushes: Pushes, jobs: Jobs) -> None:
        self._pushes = pushes
        self._jobs = jobs

    def push(self) -> int:
        """Submit an export for each checkpoint whose turn it is; how many. Blocks.

        One that its tenant has no room for waits for the next time. One whose name the tenant's own client has given to
        another job has had its turn: it must not keep all others waiting.
        """
        due = self._pushes.due()
        refused = set()
        for one in due:
            if one.push.tenant in refused:
                continue
            try:
                job = self._jobs.create(_job_of(one))
            except LimitReached as error:
                refused.add(one.push.tenant)
                _log.warning("housekeeping.not_pushed", tenant=one.push.tenant, reason=error.message, next="again soon")
                continue
            except Conflict as error:
                _log.warning(
                    "housekeeping.not_pushed", tenant=one.push.tenant, reason=error.message, next="its successor"
                )
                self._pushes.note(one, None)
                continue
            self._pushes.note(one, job.id)
        if not due:
            self._pushes.look_on()
        return len(due)


def _job_of(due: DuePush) -> NewJob:
    spec = due.spec
    return NewJob(
        id=f"job-{new_id()}",
        tenant=due.push.tenant,
        kind=JobKind.EXPORT,
        spec=spec,
        digest=hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest(),
        client_id=f"{due.push.id}:{due.content}",
        name=f"push of {due.path} to {spec['to']}"[:_LONGEST_NAME],
        max_attempts=_MAX_ATTEMPTS,
    )
