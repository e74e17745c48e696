"""What time does to the journal: gaps close, deadlines pass, results and checkpoints expire."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import structlog

from twinkle.core.clock import Clock
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Failure, FailureCategory, OperationKind, OperationState, Outcome
from twinkle.storage.checkpoints.contents import remove_checkpoints
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.keeping import held_by, hold
from twinkle.storage.journal.lanes import advance_lane, lock_lanes, number_ended_sample
from twinkle.storage.upkeep.kept_payloads import take_off_samples
from twinkle.storage.upkeep.waste import doom

_BATCH = 500
_MAX_BATCHES = 200
_LONGEST_ATTEMPT_S = 600.0

_log = structlog.get_logger()


class Upkeep:
    """The sweeps of housekeeping. Each method is idempotent, does a bounded amount and says what it did."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def close_gaps(self, *, older_than_s: float) -> list[str]:
        """Fail the missing numbers that others have waited for too long; the futures that ended.

        A tombstone takes the missing number's place, so a late arrival finds a failed future and the run goes on.
        """
        now = self._clock.now()
        lanes = self._database.read(
            "SELECT id, tenant FROM lane WHERE gap_since IS NOT NULL AND gap_since <= ? LIMIT ?",
            (now - older_than_s, _BATCH),
        )
        closed = []
        for lane in lanes:
            with self._database.transaction() as transaction:
                outcomes = self._close_gap(transaction, lane.id, now, older_than_s)
            closed += _log_each(lane.tenant, outcomes)
        return closed

    def _close_gap(self, transaction: Transaction, lane_id: str, now: float, older_than_s: float) -> list[Outcome]:
        lane = lock_lanes(transaction, [lane_id])[lane_id]
        # Another gap may have opened since the lane was found: it is measured by its own age.
        if lane.gap_since is None or lane.gap_since > now - older_than_s:
            return []
        row = transaction.execute(
            "SELECT MIN(seq) AS next_seq FROM operation WHERE lane = ? AND seq > ?", (lane_id, lane.head_seq)
        ).fetchone()
        assert row is not None
        message = (
            f"operation {{seq}} of {lane_id} never arrived: its successors waited {older_than_s:.0f} s for it; "
            "submit it again under a new number"
        )
        failure_code = "gap"
        closed = []
        for seq in range(lane.head_seq, row.next_seq):
            request_id = request_id_of(lane_id, seq)
            transaction.execute(
                "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts,"
                " claim_epoch, error, error_category, error_code, num_tokens, device_s, expired, accepted_at,"
                " finished_at, not_before)"
                " VALUES (?, ?, ?, ?, ?, 'gap', '', 'failed', 0, 0, ?, 'server', ?, 0, 0, FALSE, ?, ?, 0)",
                (request_id, lane.tenant, lane_id, lane.mesh, seq, message.format(seq=seq), failure_code, now, now),
            )
            failure = Failure(message=message.format(seq=seq), category=FailureCategory.SERVER, code=failure_code)
            outcome = Outcome(request_id=request_id, lane=lane_id, seq=seq, kind=OperationKind.GAP, failure=failure)
            advance_lane(transaction, lane, outcome, now)
            closed.append(outcome)
        return closed

    def expire_overdue(
        self, *, deadline_s: float, deadline_s_of: Mapping[OperationKind, float] = MappingProxyType({})
    ) -> list[str]:
        """Fail operations that have not ended by their deadline; the futures that ended.

        In a lane the head ends first, so order holds. One that a worker has in its hands ends when that worker's lease
        is over, or when the attempt has taken ten minutes: what the worker makes of it later finds no taker.

        Args:
            deadline_s: After its acceptance.
            deadline_s_of: The deadlines of kinds that have one of their own.
        """
        overdue = _Overdue(self._clock.now(), deadline_s, deadline_s_of)
        lanes = self._database.read(
            "SELECT DISTINCT found.lane, found.tenant FROM (SELECT o.lane, o.tenant FROM operation o"
            " JOIN lane l ON l.id = o.lane"
            f" LEFT JOIN mesh m ON m.name = o.mesh WHERE {overdue.where} AND (o.kind = 'sample' OR o.seq = l.head_seq)"
            " ORDER BY o.accepted_at LIMIT ?) AS found",
            (*overdue.parameters, _BATCH),
        )
        ended: list[str] = []
        for found in lanes:
            with self._database.transaction() as transaction:
                outcomes = _end_overdue(transaction, found.lane, overdue)
            ended += _log_each(found.tenant, outcomes)
        return ended

    def expire_results(self, *, older_than_s: float) -> list[str]:
        """Forget results that were kept for their time; the blobs nothing refers to any more, which may go now.

        The operation's row and outcome stay, and so does the payload of what a run is rebuilt from; a sample's goes.
        Results of a job that has not ended are kept until it has: whoever takes it up may ask for them again.
        """
        given_up: list[str] = []
        for _ in range(_MAX_BATCHES):
            num_expired, keys = self._expire_some_results(older_than_s)
            given_up += keys
            if num_expired < _BATCH:
                break
        return given_up

    def _expire_some_results(self, older_than_s: float) -> tuple[int, list[str]]:
        now = self._clock.now()
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                "SELECT request_id, lane, result_blob, kind = 'sample' AS is_sample,"
                " CASE WHEN kind = 'sample' THEN payload_blob END AS given_up"
                " FROM operation"
                " WHERE finished_at IS NOT NULL AND NOT expired AND held_by IS NULL AND finished_at <= ? LIMIT ?",
                (now - older_than_s, _BATCH),
            ).fetchall()
            num_found = len(rows)
            held = _hold_for_jobs(transaction, rows)
            rows = [row for row in rows if row.lane not in held]
            request_ids = [row.request_id for row in rows]
            marks = placeholders(request_ids)
            lock_lanes(transaction, (row.lane for row in rows if row.is_sample))
            take_off_samples(transaction, request_ids)
            transaction.execute(
                f"UPDATE operation SET expired = TRUE, result = NULL, result_blob = NULL WHERE request_id IN ({marks})",
                request_ids,
            )
            transaction.execute(
                f"UPDATE operation SET payload = NULL, payload_blob = NULL WHERE request_id IN ({marks})"
                " AND kind = 'sample'",
                request_ids,
            )
            keys = [key for row in rows for key in (row.result_blob, row.given_up) if key is not None]
            doom(transaction, keys, now=now)
        return num_found, keys

    def expire_checkpoints(self) -> list[str]:
        """Remove checkpoints whose time has come; their files, but for those a copy still needs, which may go now."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            _, keys = remove_checkpoints(transaction, "expires_at IS NOT NULL AND expires_at <= ?", (now,), now=now)
        return keys

    def expire_access_tokens(self) -> int:
        """Remove weights access tokens whose time is over; how many."""
        with self._database.transaction() as transaction:
            return transaction.execute("DELETE FROM access_token WHERE expires_at <= ?", (self._clock.now(),)).rowcount


def _hold_for_jobs(transaction: Transaction, rows: list[Row]) -> set[str]:
    """Keep the results that jobs may still ask for; the lanes of those."""
    jobs = held_by(transaction, sorted({row.lane for row in rows}))
    for job in sorted(set(jobs.values())):
        hold(transaction, job, [row.request_id for row in rows if jobs.get(row.lane) == job])
    return set(jobs)


class _Overdue:
    """Which operations are past their deadline: a condition on ``operation o`` and ``mesh m``."""

    def __init__(self, now: float, deadline_s: float, deadline_s_of: Mapping[OperationKind, float]) -> None:
        self.now = now
        self._deadline_s = deadline_s
        self._deadline_s_of = deadline_s_of
        cases = " ".join("WHEN ? THEN CAST(? AS DOUBLE PRECISION)" for _ in deadline_s_of)
        latest = f"CASE o.kind {cases} ELSE CAST(? AS DOUBLE PRECISION) END" if cases else "?"
        self.where = (
            "o.state IN ('queued', 'running') AND o.accepted_at <= ?"
            f" AND o.accepted_at <= {latest}"
            " AND (o.state = 'queued' OR o.started_at <= ? OR COALESCE(m.expires_at, 0) <= ?)"
        )
        self.parameters: tuple[object, ...] = (
            now - min([deadline_s, *deadline_s_of.values()]),
            *(value for kind, own_s in deadline_s_of.items() for value in (kind.value, now - own_s)),
            now - deadline_s,
            now - _LONGEST_ATTEMPT_S,
            now,
        )

    def failure(self, kind: OperationKind, state: str) -> Failure:
        """What to tell of one."""
        after_s = self._deadline_s_of.get(kind, self._deadline_s)
        what = "no worker took this operation" if state == OperationState.QUEUED else "this operation did not end"
        return Failure(
            message=f"{what} within its deadline of {after_s:.0f} s",
            category=FailureCategory.SERVER,
            code="deadline",
        )


def _end_overdue(transaction: Transaction, lane: str, overdue: _Overdue) -> list[Outcome]:
    """End a lane's overdue samples, or its head and those behind it as long as they are overdue."""
    locked = lock_lanes(transaction, [lane])[lane]
    rows = transaction.execute(
        "SELECT o.request_id, o.seq, o.kind, o.state FROM operation o LEFT JOIN mesh m ON m.name = o.mesh"
        f" WHERE o.lane = ? AND o.seq >= ? AND {overdue.where} ORDER BY o.seq LIMIT ?",
        (lane, locked.head_seq if locked.ordered else 0, *overdue.parameters, _BATCH),
    ).fetchall()
    next_seq = locked.head_seq
    ended = []
    for row in rows:
        if locked.ordered and row.seq != next_seq:
            break
        next_seq += 1
        kind = OperationKind(row.kind)
        failure = overdue.failure(kind, row.state)
        transaction.execute(
            "UPDATE operation SET state = 'failed', error = ?, error_category = ?, error_code = ?, finished_at = ?"
            " WHERE request_id = ?",
            (failure.message, failure.category.value, failure.code, overdue.now, row.request_id),
        )
        outcome = Outcome(request_id=row.request_id, lane=lane, seq=row.seq, kind=kind, failure=failure)
        if locked.ordered:
            advance_lane(transaction, locked, outcome, overdue.now)
        else:
            number_ended_sample(transaction, lane, row.request_id)
        ended.append(outcome)
    return ended


def _log_each(tenant: str, failed: list[Outcome]) -> list[str]:
    """Give each failed operation of a tenant its line in the log; their futures."""
    for outcome in failed:
        assert outcome.failure is not None
        _log.warning(
            "operation.failed",
            op=outcome.request_id,
            kind=outcome.kind.value,
            tenant=tenant,
            adapter=outcome.lane,
            seq=outcome.seq,
            reason=outcome.failure.code,
            category=outcome.failure.category.value,
        )
    return [outcome.request_id for outcome in failed]
