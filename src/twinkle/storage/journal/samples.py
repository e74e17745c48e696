"""What a sampling client may do with its samples as a whole: see which have ended, cancel one, be one of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Cancelled, InvalidInput, NotFound
from twinkle.core.operation import FailureCategory, OperationKind, OperationState
from twinkle.storage.database import Database
from twinkle.storage.journal.lanes import lock_lanes, number_ended_sample

_SEQS_PER_CLIENT = 1_000_000_000
_CANCELLED_TEXT = "cancelled by its client"


@dataclass(frozen=True, kw_only=True)
class EndedSample:
    """A sample with an outcome. ``ended_no`` grows with time within a sampling session."""

    request_id: str
    ended_no: int
    failed: bool
    result_bytes: int | None
    """The size of its result; ``None`` when it failed, or ended before sizes were kept."""


@dataclass(frozen=True, kw_only=True)
class SamplePoll:
    """A client of a sampling session that wants to hear of samples with an ``ended_no`` above ``after``."""

    lane: str
    client: int
    after: int


class SampleJournal:
    """The journal as the clients of one sampling session see it."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def cancel(self, request_id: str, tenant: str) -> bool:
        """End a sample with the failure ``cancelled``; false when it has ended already.

        Whoever runs it hears of it at its next look, and its outcome is no longer taken.

        Raises:
            NotFound: There is no such future, or it is another tenant's.
            InvalidInput: It is a training operation: those are applied once they are accepted.
        """
        with self._database.transaction() as transaction:
            row = transaction.execute(
                "SELECT tenant, kind, lane FROM operation WHERE request_id = ?", (request_id,)
            ).fetchone()
            if row is None or row.tenant != tenant:
                raise NotFound(f"no future {request_id!r}")
            if row.kind != OperationKind.SAMPLE:
                raise InvalidInput(
                    "request_id", f"a {row.kind} cannot be cancelled once it is accepted; only samples can"
                )
            lock_lanes(transaction, [row.lane])
            changed = transaction.execute(
                "UPDATE operation SET state = 'failed', error = ?, error_category = ?, error_code = ?, finished_at = ?"
                " WHERE request_id = ? AND state IN ('queued', 'running')",
                (_CANCELLED_TEXT, FailureCategory.USER.value, Cancelled.code, self._clock.now(), request_id),
            ).rowcount
            if changed == 1:
                number_ended_sample(transaction, row.lane, request_id)
        return changed == 1

    def ended(self, sampling_session: str, *, client: int, after: int, limit: int) -> list[EndedSample]:
        """One client's samples with an ``ended_no`` above ``after``, in the order in which they ended."""
        first_seq = client * _SEQS_PER_CLIENT
        rows = self._database.read(
            "SELECT request_id, ended_no, state, result_bytes FROM operation"
            " WHERE lane = ? AND ended_no > ? AND seq >= ? AND seq < ? ORDER BY ended_no LIMIT ?",
            (sampling_session, after, first_seq, first_seq + _SEQS_PER_CLIENT, limit),
        )
        return [
            EndedSample(
                request_id=row.request_id,
                ended_no=row.ended_no,
                failed=row.state == OperationState.FAILED,
                result_bytes=row.result_bytes,
            )
            for row in rows
        ]

    def having_ended(self, polls: Sequence[SamplePoll]) -> list[int]:
        """The places of those polls for which there is something, in one query for all of them."""
        wanted = ", ".join(["(?, ?, CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS BIGINT))"] * len(polls))
        parameters: list[object] = []
        for place, poll in enumerate(polls):
            first_seq = poll.client * _SEQS_PER_CLIENT
            parameters += [place, poll.lane, poll.after, first_seq, first_seq + _SEQS_PER_CLIENT]
        rows = self._database.read(
            f"WITH wanted(place, lane, after_no, first_seq, end_seq) AS (VALUES {wanted})"
            " SELECT w.place FROM wanted w WHERE EXISTS (SELECT 1 FROM operation o WHERE o.lane = w.lane"
            " AND o.ended_no > w.after_no AND o.seq >= w.first_seq AND o.seq < w.end_seq) ORDER BY w.place",
            parameters,
        )
        return [int(row.place) for row in rows]

    def join(self, sampling_session: str, tenant: str) -> int:
        """A number for one more client of a sampling session; its first client has 0.

        Raises:
            NotFound: There is no such sampling session, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            row = transaction.execute(
                "UPDATE sampling_session SET num_clients = num_clients + 1 WHERE id = ? AND tenant = ?"
                " RETURNING num_clients",
                (sampling_session, tenant),
            ).fetchone()
        if row is None:
            raise NotFound(f"no sampling session {sampling_session!r}")
        return int(row.num_clients) - 1
