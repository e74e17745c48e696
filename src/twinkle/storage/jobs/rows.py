"""Rows of jobs as nouns, and the writes that every part of a job's life shares."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict

from twinkle.core.job import (
    FINAL_STATES,
    GROUPS,
    Job,
    JobEvent,
    JobFailure,
    JobKind,
    JobState,
    JsonObject,
)
from twinkle.storage.database import Row, Transaction, placeholders

COLUMNS = (
    "id, tenant, kind, spec, digest, client_id, name, parent, nice, max_attempts, notify_url, user_metadata, seed,"
    " state, phase, progress, saved, result, failure, attempt, num_failures, best_done, epoch, owner, lease_until,"
    " not_before, num_needs, created_at, started_at, finished_at, expires_at, cancel_requested_at, pause_requested_at"
)

_GROUP_KINDS = ", ".join(f"'{kind.value}'" for kind in sorted(GROUPS))
_HAS_BEGUN = f"(state = 'waiting' AND kind IN ({_GROUP_KINDS}) AND started_at IS NOT NULL)"

MAX_EVENTS = 10_000
"""The events of one job that are kept: the last ones."""

_PRUNED_EVERY = 500


def job_of(row: Row) -> Job:
    """A job as its row has it."""
    failure = None if row.failure is None else JobFailure(**json.loads(row.failure))
    return Job(
        id=row.id,
        tenant=row.tenant,
        kind=JobKind(row.kind),
        spec=json.loads(row.spec),
        digest=row.digest,
        client_id=row.client_id,
        name=row.name,
        parent=row.parent,
        nice=row.nice,
        max_attempts=row.max_attempts,
        notify_url=row.notify_url,
        metadata=json.loads(row.user_metadata),
        seed=row.seed,
        state=_shown_state(row),
        phase=row.phase,
        progress=_shown_progress(row),
        result=None if row.result is None else json.loads(row.result),
        failure=failure,
        attempt=row.attempt,
        num_failures=row.num_failures,
        not_before=row.not_before,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        expires_at=row.expires_at,
        cancel_requested=row.cancel_requested_at is not None,
        pause_requested=row.pause_requested_at is not None,
        cancel_requested_at=row.cancel_requested_at,
    )


def shown_in(states: Set[JobState]) -> str:
    """Which rows :func:`job_of` shows in one of these states, in SQL that leaves the planner its statistics."""
    known = "state IN (" + ", ".join(f"'{state.value}'" for state in sorted(states)) + ")"
    if JobState.RUNNING in states and JobState.WAITING not in states:
        known = f"({known} OR {_HAS_BEGUN})"
    elif JobState.WAITING in states and JobState.RUNNING not in states:
        known = f"({known} AND NOT {_HAS_BEGUN})"
    # Of many jobs that have ended few have not, and these have an index.
    return known if states & FINAL_STATES else f"finished_at IS NULL AND {known}"


def _shown_state(row: Row) -> JobState:
    """A sweep or a flow runs for as long as anything of it has begun and not all has ended."""
    state = JobState(row.state)
    has_begun = state is JobState.WAITING and row.kind in GROUPS and row.started_at is not None
    return JobState.RUNNING if has_begun else state


def _shown_progress(row: Row) -> JsonObject:
    progress: JsonObject = json.loads(row.progress)
    if row.kind in GROUPS and row.finished_at is None and "total" in progress:
        return {**progress, "done": progress["total"] - row.num_needs}
    return progress


def failure_text(failure: JobFailure) -> str:
    """A failure as it is kept."""
    return json.dumps(asdict(failure))


def append_events(transaction: Transaction, job: str, events: Sequence[JobEvent], now: float) -> None:
    """Number the events behind those that are there; forget the oldest of a job that has very many."""
    if not events:
        return
    row = transaction.execute(
        "UPDATE job SET num_events = num_events + ? WHERE id = ? RETURNING num_events", (len(events), job)
    ).fetchone()
    assert row is not None, "the job's row is locked by this transaction"
    first = row.num_events - len(events) + 1
    for number, event in enumerate(events, first):
        transaction.execute(
            "INSERT INTO job_event (job, number, at, kind, message, data) VALUES (?, ?, ?, ?, ?, ?)",
            (job, number, now, event.kind, event.message, json.dumps(event.data)),
        )
    if row.num_events // _PRUNED_EVERY > (first - 1) // _PRUNED_EVERY:
        transaction.execute("DELETE FROM job_event WHERE job = ? AND number <= ?", (job, row.num_events - MAX_EVENTS))


def end_job(
    transaction: Transaction,
    job: str,
    state: JobState,
    now: float,
    *,
    result: str | None = None,
    failure: JobFailure | None = None,
) -> None:
    """Make a job final and tell those that wait for it. Its row is locked by this transaction."""
    assert state in FINAL_STATES
    transaction.execute(
        "UPDATE job SET state = ?, result = ?, failure = ?, finished_at = ?, owner = NULL, paused_at = NULL"
        " WHERE id = ?",
        (state.value, result, None if failure is None else failure_text(failure), now, job),
    )
    needing = transaction.execute(
        "UPDATE job_dependency SET ended = TRUE WHERE needs = ? AND NOT ended RETURNING job, condition", (job,)
    ).fetchall()
    # In one order, whoever else ends at this moment.
    ids = sorted(row.job for row in needing)
    marks = placeholders(ids)
    transaction.execute(f"SELECT id FROM job WHERE id IN ({marks}) ORDER BY id FOR UPDATE", ids)
    transaction.execute(f"UPDATE job SET num_needs = num_needs - 1 WHERE id IN ({marks})", ids)
    if state is not JobState.SUCCEEDED:
        broken = [row.job for row in needing if row.condition == "ok"]
        transaction.execute(
            f"UPDATE job SET broken_need = ? WHERE broken_need IS NULL AND id IN ({placeholders(broken)})",
            (job, *broken),
        )
    append_events(transaction, job, [_ending(state, failure)], now)


def _ending(state: JobState, failure: JobFailure | None) -> JobEvent:
    if failure is None:
        return JobEvent(kind="status", message=state.value, data={"state": state.value})
    return JobEvent(kind="status", message=failure.message, data={"state": state.value, "code": failure.code})
