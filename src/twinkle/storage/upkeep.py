"""What time does to the journal: gaps close, deadlines pass, results and checkpoints expire."""

from __future__ import annotations

from twinkle.core.clock import Clock
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Failure, FailureCategory, OperationKind, Outcome
from twinkle.storage.copies import remove_checkpoints
from twinkle.storage.database import Database, Transaction
from twinkle.storage.lanes import advance_lane, lock_lanes, number_ended_sample

_BATCH = 500


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
            "SELECT id FROM lane WHERE gap_since IS NOT NULL AND gap_since <= ? LIMIT ?", (now - older_than_s, _BATCH)
        )
        closed = []
        for (lane_id,) in lanes:
            with self._database.transaction() as transaction:
                closed += self._close_gap(transaction, lane_id, now, older_than_s)
        return closed

    def _close_gap(self, transaction: Transaction, lane_id: str, now: float, older_than_s: float) -> list[str]:
        lane = lock_lanes(transaction, [lane_id])[lane_id]
        if lane.head_kind is not None or lane.max_seq < lane.head_seq:
            return []
        row = transaction.execute(
            "SELECT MIN(seq) FROM operation WHERE lane = ? AND seq > ?", (lane_id, lane.head_seq)
        ).fetchone()
        assert row is not None
        message = (
            f"operation {{seq}} of {lane_id} never arrived: its successors waited {older_than_s:.0f} s for it; "
            "submit it again under a new number"
        )
        failure_code = "gap"
        closed = []
        for seq in range(lane.head_seq, row[0]):
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
            advance_lane(transaction, outcome, now)
            closed.append(request_id)
        return closed

    def expire_overdue(self, *, deadline_s: float) -> list[str]:
        """Fail queued operations that nobody started before their deadline; the futures that ended.

        Only heads of lanes and samples are taken, so order holds; the successors follow in the next sweeps.
        """
        now = self._clock.now()
        rows = self._database.read(
            "SELECT o.request_id, o.lane, o.seq, o.kind FROM operation o JOIN lane l ON l.id = o.lane"
            " WHERE o.state = 'queued' AND o.accepted_at <= ? AND (o.kind = 'sample' OR o.seq = l.head_seq)"
            " ORDER BY o.accepted_at LIMIT ?",
            (now - deadline_s, _BATCH),
        )
        ended = []
        for request_id, lane_id, seq, kind in rows:
            failure = Failure(
                message=f"no worker took this operation within its deadline of {deadline_s:.0f} s",
                category=FailureCategory.SERVER,
                code="deadline",
            )
            with self._database.transaction() as transaction:
                lock_lanes(transaction, [lane_id])
                changed = transaction.execute(
                    "UPDATE operation SET state = 'failed', error = ?, error_category = ?, error_code = ?,"
                    " finished_at = ? WHERE request_id = ? AND state = 'queued'",
                    (failure.message, failure.category.value, failure.code, now, request_id),
                ).rowcount
                if changed == 1:
                    outcome = Outcome(
                        request_id=request_id, lane=lane_id, seq=seq, kind=OperationKind(kind), failure=failure
                    )
                    if outcome.kind.is_ordered:
                        advance_lane(transaction, outcome, now)
                    else:
                        number_ended_sample(transaction, lane_id, request_id)
                    ended.append(request_id)
        return ended

    def expire_results(self, *, older_than_s: float) -> list[str]:
        """Forget results that were kept for their time; the blob keys nothing refers to any more.

        The operation's row, its payload and its outcome stay: they are what a run is rebuilt from.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                "UPDATE operation SET expired = TRUE, result = NULL WHERE request_id IN (SELECT request_id FROM"
                " operation WHERE finished_at IS NOT NULL AND NOT expired AND finished_at <= ? LIMIT ?)"
                " RETURNING result_blob",
                (now - older_than_s, _BATCH),
            ).fetchall()
        return [row[0] for row in rows if row[0] is not None]

    def expire_checkpoints(self) -> list[str]:
        """Remove checkpoints whose time has come; the keys of their files, but for those a copy still needs."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            _, keys = remove_checkpoints(transaction, "expires_at IS NOT NULL AND expires_at <= ?", (now,), now=now)
        return keys
