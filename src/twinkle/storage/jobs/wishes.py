"""What owners wish of their jobs: to end, to be held, to go on, to be tried again. Of a sweep or a flow, of all it is.

Members are locked before what they are members of, as a member does that ends: two that meet wait, and none for ever.
"""

from __future__ import annotations

from twinkle.core.errors import Conflict, NotFound
from twinkle.core.job import FINAL_STATES, GROUPS, JobEvent, JobKind, JobState
from twinkle.storage.database import Row, Transaction, placeholders
from twinkle.storage.jobs.rows import append_events, end_job

_COLUMNS = "id, kind, state, attempt, num_needs, broken_need, cancel_requested_at"


def cancel(transaction: Transaction, tenant: str, job_id: str, now: float) -> None:
    """End a job: at once if it never ran, else as soon as its plan has put down what there is.

    A sweep or flow ends by itself when all that it is made of has.

    Raises:
        NotFound: It does not exist or is another tenant's.
    """
    for row in _family(transaction, tenant, job_id):
        state = JobState(row.state)
        if state in FINAL_STATES:
            continue
        if _is_group(row):
            _cancel_group(transaction, row, now)
        elif row.attempt == 0:
            end_job(transaction, row.id, JobState.CANCELLED, now)
        elif row.cancel_requested_at is None:
            # Whoever runs it hears of it with the next beat; else somebody is to take it up and let it end.
            ready = "" if state is JobState.RUNNING else ", state = 'queued', not_before = 0, nudged_at = 0"
            transaction.execute(
                f"UPDATE job SET cancel_requested_at = ?, paused_at = NULL{ready} WHERE id = ?", (now, row.id)
            )
            append_events(transaction, row.id, [_status("cancelling", state)], now)


def pause(transaction: Transaction, tenant: str, job_id: str, now: float) -> None:
    """Hold a job: at once if nobody runs it, else at its plan's next safe point.

    Raises:
        NotFound: It does not exist or is another tenant's.
        Conflict: It has ended, or is being cancelled.
    """
    *members, own = _family(transaction, tenant, job_id)
    if own.state in FINAL_STATES or own.cancel_requested_at is not None:
        word = own.state if own.state in FINAL_STATES else "being cancelled"
        raise Conflict(f"job {job_id} is {word}; it cannot be paused any more")
    for row in (*members, own):
        if row.cancel_requested_at is not None:
            continue
        if row.state == JobState.RUNNING:
            transaction.execute(
                "UPDATE job SET pause_requested_at = COALESCE(pause_requested_at, ?) WHERE id = ?", (now, row.id)
            )
        elif row.state != JobState.PAUSED:
            transaction.execute("UPDATE job SET state = 'paused', paused_at = ? WHERE id = ?", (now, row.id))
            append_events(transaction, row.id, [_status("paused", JobState.PAUSED)], now)


def resume(transaction: Transaction, tenant: str, job_id: str, now: float) -> None:
    """Let a paused job go on; one that is not paused is left as it is. The pause is no part of its time.

    Raises:
        NotFound: It does not exist or is another tenant's.
        Conflict: It has ended.
    """
    *members, own = _family(transaction, tenant, job_id)
    if own.state in FINAL_STATES:
        raise Conflict(f"job {job_id} is {own.state}; only a paused job can be resumed")
    for row in (*members, own):
        transaction.execute("UPDATE job SET pause_requested_at = NULL WHERE id = ?", (row.id,))
        if row.state == JobState.PAUSED:
            waits = row.num_needs or row.broken_need is not None
            follows = JobState.WAITING if waits else _goes_on_as(transaction, row)
            transaction.execute(
                "UPDATE job SET state = ?, expires_at = expires_at + (? - paused_at), paused_at = NULL,"
                " not_before = 0, nudged_at = 0 WHERE id = ?",
                (follows.value, now, row.id),
            )
            append_events(transaction, row.id, [_status("resumed", follows)], now)


def retry(transaction: Transaction, tenant: str, job_id: str, now: float) -> None:
    """Give a job that failed or was cancelled another attempt, from what it had saved; of a group, all that did.

    Raises:
        NotFound: It does not exist or is another tenant's.
        Conflict: It has not failed.
    """
    family = _family(transaction, tenant, job_id, with_ended=True)
    again = [row for row in family if row.state in (JobState.FAILED, JobState.CANCELLED)]
    own = family[-1]
    if not again or own.state not in FINAL_STATES:
        raise Conflict(f"job {job_id} is {own.state}; only one that failed or was cancelled can be retried")
    # A group that has succeeded though some members have not, comes to its result anew.
    ids = sorted({row.id for row in again} | {row.id for row in family if _is_group(row) and row.state in FINAL_STATES})
    marks = placeholders(ids)
    transaction.execute(
        "UPDATE job SET state = 'retrying', failure = NULL, result = NULL, finished_at = NULL, num_failures = 0,"
        " num_needs = 0, broken_need = NULL, cancel_requested_at = NULL, pause_requested_at = NULL,"
        f" not_before = 0, nudged_at = 0 WHERE id IN ({marks})",
        ids,
    )
    # Of what has ended before they wait for nobody any more; for each other they do.
    transaction.execute(f"UPDATE job_dependency SET ended = TRUE WHERE job IN ({marks})", ids)
    transaction.execute(
        f"UPDATE job_dependency SET ended = FALSE WHERE job IN ({marks}) AND needs IN ({marks})", (*ids, *ids)
    )
    transaction.execute(
        "UPDATE job SET state = 'waiting', num_needs = (SELECT COUNT(*) FROM job_dependency d WHERE d.job = job.id"
        f" AND NOT d.ended) WHERE id IN ({marks}) AND EXISTS (SELECT 1 FROM job_dependency d WHERE d.job = job.id"
        " AND NOT d.ended)",
        ids,
    )
    for job in ids:
        append_events(transaction, job, [_status("to be retried", JobState.RETRYING)], now)


def _goes_on_as(transaction: Transaction, row: Row) -> JobState:
    """Whether a job that is resumed goes on in the middle of its attempt, or with another one: the last has failed."""
    last = transaction.execute(
        "SELECT ended_at FROM job_attempt WHERE job = ? AND attempt = ?", (row.id, row.attempt)
    ).fetchone()
    return JobState.QUEUED if last is None or last.ended_at is None else JobState.RETRYING


def _cancel_group(transaction: Transaction, row: Row, now: float) -> None:
    """Its members have been told already; with the last of them that ends it comes to its result."""
    follows = "waiting" if row.num_needs else "queued"
    state = row.state if row.state == JobState.RUNNING else follows
    transaction.execute(
        "UPDATE job SET cancel_requested_at = COALESCE(cancel_requested_at, ?), paused_at = NULL, state = ?"
        " WHERE id = ?",
        (now, state, row.id),
    )
    if row.cancel_requested_at is None:
        append_events(transaction, row.id, [_status("cancelling", JobState(row.state))], now)


def _family(transaction: Transaction, tenant: str, job_id: str, *, with_ended: bool = False) -> list[Row]:
    """A job behind all that it is made of, each with its row locked; those that have ended only where asked for."""
    found = transaction.execute("SELECT kind FROM job WHERE id = ? AND tenant = ?", (job_id, tenant)).fetchone()
    if found is None:
        raise NotFound(f"no job {job_id!r}")
    family: list[Row] = []
    if found.kind in GROUPS:
        open_only = "" if with_ended else " AND finished_at IS NULL"
        members = transaction.execute(
            f"SELECT id, kind FROM job WHERE parent = ?{open_only} ORDER BY created_at, id", (job_id,)
        ).fetchall()
        for member in members:
            family += _family(transaction, tenant, member.id, with_ended=with_ended)
    # Read again: what it was before its lock was had may be long ago.
    own = transaction.execute(f"SELECT {_COLUMNS} FROM job WHERE id = ? FOR UPDATE", (job_id,)).fetchone()
    assert own is not None, "jobs that are not final stay, and those that are go with what they belong to"
    return [*family, own] if with_ended or own.state not in FINAL_STATES or own.id == job_id else family


def _is_group(row: Row) -> bool:
    return JobKind(row.kind) in GROUPS


def _status(message: str, state: JobState) -> JobEvent:
    return JobEvent(kind="status", message=message, data={"state": state.value})
