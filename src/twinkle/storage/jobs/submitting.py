"""How jobs come into the journal: any number in one transaction, with what they wait for and within their limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from twinkle.core.errors import Conflict, InvalidInput, LimitReached, NotFound
from twinkle.core.job import GROUPS, JobState, NewJob
from twinkle.core.limits import TenantLimits
from twinkle.storage.database import Transaction

_STEP_S = 1e-5
"""Between the members of an array, so that a list of jobs has their order."""

_ROWS_A_STATEMENT = 200


@dataclass(frozen=True, kw_only=True)
class _Need:
    """A job that another one waits for."""

    job: str
    needs: str
    condition: str
    ended: bool


@dataclass
class _Needs:
    """What a new job waits for, as it stands by now."""

    num: int = 0
    broken: str | None = None
    noted: list[_Need] = field(default_factory=list)


def submit(
    transaction: Transaction, groups: Sequence[Sequence[NewJob]], now: float, *, limits: TenantLimits
) -> list[str]:
    """Take jobs on, all of them or none, each at the head of what it is made of; the ids of those at the head.

    One may wait for any other of the request. Where the one at the head is there already, so is what it is made of.

    Raises:
        Conflict: A client's id was used for another job.
        NotFound: A job to wait for does not exist or is another tenant's.
        LimitReached: A tenant would have more jobs than it may.
    """
    heads: list[str] = []
    made: list[NewJob] = []
    for group in groups:
        head, *members = group
        if not _insert(transaction, head, now + len(made) * _STEP_S):
            heads.append(_same_job(transaction, head))
            continue
        heads.append(head.id)
        made.append(head)
        for member in members:
            if not _insert(transaction, member, now + len(made) * _STEP_S):
                raise Conflict(f"the id {member.id!r} was used for another job")
            made.append(member)
    _note_submitted(transaction, made, now)
    _note_needs(transaction, made)
    for tenant in sorted({new.tenant for new in made}):
        _check_limit(transaction, tenant, limits, num_new=sum(new.tenant == tenant for new in made))
    return heads


def _insert(transaction: Transaction, new: NewJob, created_at: float) -> bool:
    return bool(
        transaction.execute(
            "INSERT INTO job (id, tenant, kind, spec, digest, client_id, name, parent, at_once, nice, max_attempts,"
            " notify_url, user_metadata, seed, state, progress, saved, attempt, num_failures, best_done, num_events,"
            " num_needs, holds, epoch, lease_until, not_before, nudged_at, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?,"
            " 'queued', ?, '{}', 0, 0, 0, 1, 0, FALSE, 0, 0, 0, 0, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (
                new.id,
                new.tenant,
                new.kind.value,
                json.dumps(new.spec),
                new.digest,
                new.client_id,
                new.name,
                new.parent,
                new.at_once,
                new.nice,
                new.max_attempts,
                new.notify_url,
                json.dumps(new.metadata),
                new.drawn_seed,
                json.dumps({"done": 0, "total": len(new.after), "unit": "jobs"} if new.kind in GROUPS else {}),
                created_at,
                new.expires_at,
            ),
        ).rowcount
    )


def _same_job(transaction: Transaction, new: NewJob) -> str:
    """The job that is there already, if it is the one that is meant."""
    row = transaction.execute(
        "SELECT id, digest FROM job WHERE tenant = ? AND (client_id = ? OR id = ?)",
        (new.tenant, new.client_id, new.id),
    ).fetchone()
    if row is None or row.digest != new.digest:
        raise Conflict(f"the id {new.client_id or new.id!r} was used for another job; choose a new one")
    job_id: str = row.id
    return job_id


def _note_submitted(transaction: Transaction, made: Sequence[NewJob], now: float) -> None:
    data = json.dumps({"state": JobState.QUEUED.value})
    rows = [(new.id, 1, now, "status", "submitted", data) for new in made]
    _insert_many(transaction, "job_event (job, number, at, kind, message, data)", rows)


def _note_needs(transaction: Transaction, made: Sequence[NewJob]) -> None:
    """What each waits for. What has ended by now is not waited for; what is made beside it has not."""
    beside = {new.id for new in made}
    others = sorted({(new.tenant, one.job) for new in made for one in new.after if one.job not in beside})
    parents = {(new.tenant, new.parent) for new in made if new.parent is not None and new.parent not in beside}
    states = {other: _lock(transaction, *other) for other in sorted({*others, *parents})}
    found = [(new, _needs_of(new, states)) for new in made if new.after]
    rows = [(need.job, need.needs, need.condition, need.ended) for _, needs in found for need in needs.noted]
    _insert_many(transaction, "job_dependency (job, needs, condition, ended)", rows)
    for new, needs in found:
        transaction.execute(
            "UPDATE job SET state = 'waiting', num_needs = ?, broken_need = ? WHERE id = ?",
            (needs.num, needs.broken, new.id),
        )


def _needs_of(new: NewJob, states: dict[tuple[str, str], JobState]) -> _Needs:
    conditions: dict[str, str] = {}
    for one in new.after:
        if one.job == new.id:
            raise InvalidInput("after", f"job {new.id} cannot wait for itself")
        if conditions.get(one.job) != "ok":
            conditions[one.job] = one.condition
    needs = _Needs()
    for job, condition in sorted(conditions.items()):
        state = states.get((new.tenant, job), JobState.QUEUED)
        needs.noted.append(_Need(job=new.id, needs=job, condition=condition, ended=state.is_final))
        needs.num += not state.is_final
        if condition == "ok" and state.is_final and state is not JobState.SUCCEEDED:
            needs.broken = job
    return needs


def _lock(transaction: Transaction, tenant: str, job_id: str) -> JobState:
    row = transaction.execute(
        "SELECT state FROM job WHERE id = ? AND tenant = ? FOR UPDATE", (job_id, tenant)
    ).fetchone()
    if row is None:
        raise NotFound(f"no job {job_id!r}")
    return JobState(row.state)


def _check_limit(transaction: Transaction, tenant: str, limits: TenantLimits, *, num_new: int) -> None:
    """Raises where the tenant has too many now; whoever else submits for it at this moment waits for its row."""
    own = transaction.execute("SELECT max_jobs FROM tenant WHERE id = ? FOR UPDATE", (tenant,)).fetchone()
    most = limits.max_jobs if own is None or own.max_jobs is None else own.max_jobs
    if not most:
        return
    row = transaction.execute(
        "SELECT COUNT(*) AS num FROM job WHERE tenant = ? AND finished_at IS NULL", (tenant,)
    ).fetchone()
    assert row is not None, "a count is always there"
    if row.num > most:
        raise LimitReached(
            f"you have {row.num - num_new} jobs that have not ended, and {most} may be (max_jobs); these would be"
            f" {num_new} more. Let some end, cancel some (twinkle jobs cancel), or ask your administrator for more"
        )


def _insert_many(transaction: Transaction, into: str, rows: Sequence[tuple[object, ...]]) -> None:
    for start in range(0, len(rows), _ROWS_A_STATEMENT):
        some = rows[start : start + _ROWS_A_STATEMENT]
        marks = ", ".join(f"({', '.join('?' * len(row))})" for row in some)
        transaction.execute(f"INSERT INTO {into} VALUES {marks}", [value for row in some for value in row])
