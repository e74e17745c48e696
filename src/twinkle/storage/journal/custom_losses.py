"""Custom losses: operations that are complete as soon as they are accepted, numbered within their session.

What defines a loss is the payload of its operation. Payloads of this kind are kept as long as the journal itself: any
``forward_backward`` that names the loss may be replayed, also when the session has long lapsed.
"""

from __future__ import annotations

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound, UserError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, FailureCategory, OperationKind, OperationState, Submission
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import answer_resend
from twinkle.storage.journal.lanes import NO_MESH, lock_lanes


class CustomLosses:
    """The losses that clients have defined."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def record(self, submission: Submission, *, result: bytes) -> Accepted:
        """Accept a loss, or its rejection, and complete its future; doing it again answers the same.

        Raises:
            Conflict: The number was used for another loss.
            NotFound: The lane is another tenant's.
        """
        failure = submission.rejection
        now = self._clock.now()
        request_id = request_id_of(submission.lane, submission.seq)
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
                " VALUES (?, ?, ?, FALSE, 0, -1, 0, 0) ON CONFLICT (id) DO NOTHING",
                (submission.lane, submission.tenant, NO_MESH),
            )
            lane = lock_lanes(transaction, [submission.lane])[submission.lane]
            if lane.tenant != submission.tenant:
                raise NotFound(f"no session of lane {submission.lane!r}")
            inserted = transaction.execute(
                "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts,"
                " claim_epoch, payload, payload_bytes, result, error, error_category, error_code, num_tokens,"
                " num_prompt_tokens, device_s, expired, not_before, accepted_at, finished_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?, ?, ?, ?, 0, 0, 0, FALSE, 0, ?, ?)"
                " ON CONFLICT (lane, seq) DO NOTHING",
                (
                    request_id,
                    submission.tenant,
                    submission.lane,
                    lane.mesh,
                    submission.seq,
                    OperationKind.CREATE_CUSTOM_LOSS.value,
                    submission.digest,
                    (OperationState.DONE if failure is None else OperationState.FAILED).value,
                    submission.payload.inline,
                    submission.payload.size_bytes,
                    result if failure is None else None,
                    failure,
                    None if failure is None else FailureCategory.USER.value,
                    None if failure is None else UserError.code,
                    now,
                    now,
                ),
            )
            if inserted.rowcount == 1:
                return Accepted(request_id=request_id, mesh=lane.mesh, is_new=True)
            answer = answer_resend(transaction, lane, submission, request_id)
        if isinstance(answer, UserError):
            raise answer
        return answer

    def definition(self, lane: str, number: int) -> bytes | None:
        """What defines loss ``number`` of a session's lane; ``None`` when there is no such loss."""
        rows = self._database.read(
            "SELECT payload FROM operation WHERE request_id = ? AND kind = ? AND state = ?",
            (request_id_of(lane, number), OperationKind.CREATE_CUSTOM_LOSS.value, OperationState.DONE.value),
        )
        return None if not rows else bytes(rows[0].payload)
