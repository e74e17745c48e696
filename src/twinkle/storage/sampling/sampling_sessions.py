"""Sampling sessions: what each samples from, its clients and their samples, and when weights without a name end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Cancelled, InvalidInput, NotFound
from twinkle.core.operation import FailureCategory, OperationKind, OperationState, Payload
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.keeping import IS_HELD
from twinkle.storage.journal.forgotten import SEQS_PER_CLIENT, has_sample, owners_of_forgotten, sample_parameters
from twinkle.storage.journal.lanes import lock_lanes, number_ended_sample
from twinkle.storage.sampling.ephemeral import KEEP, NOTHING_WAITS, EphemeralWeights

_CANCELLED_TEXT = "cancelled by its client"
_MAX_TO_PIN = 16
_HELD_FOR_JOB = IS_HELD.format(session="ephemeral_weights.session")

_SAMPLING_SESSION = (
    "SELECT s.id, s.tenant, s.session, s.base_model, s.model_path, s.checkpoint, s.content, s.generation, e.adapter,"
    " e.seq, e.end_reason, l.head_seq FROM sampling_session s"
    " LEFT JOIN ephemeral_weights e ON e.sampling_session = s.id LEFT JOIN lane l ON l.id = e.adapter WHERE s.id = ?"
)


@dataclass(frozen=True, kw_only=True)
class SamplingSession:
    """What a sampling client samples from: the base model, one ``content``, or ``weights`` without a name.

    The content is what ``checkpoint`` meant at its opening, readable in a stranger's session as long as it is of the
    same ``generation``.
    """

    id: str
    tenant: str
    session: str
    base_model: str
    model_path: str | None
    checkpoint: str | None
    content: str | None
    generation: int | None
    weights: EphemeralWeights | None = None


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


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long weights stay open: after their last sample, and after their client was last heard of."""

    idle_s: float
    silent_s: float


class SamplingSessions:
    """What clients sample from, and what they may do with their samples as a whole."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, sampling_session_id: str, *, tenant: str | None = None) -> SamplingSession:
        """One sampling session; ``tenant=None`` is for workers.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        rows = self._database.read(_SAMPLING_SESSION, (sampling_session_id,))
        if not rows or (tenant is not None and rows[0].tenant != tenant):
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return _sampling_session_of(rows[0])

    def sampled_before(self, session_id: str, *, checkpoint: str, seq: int) -> str | None:
        """The sampling session on a path, whatever that meant then, in which a sample of this number was accepted."""
        rows = self._database.read(
            f"SELECT s.id FROM sampling_session s WHERE s.session = ? AND s.checkpoint = ? AND {has_sample('s.id')}"
            " LIMIT 1",
            (session_id, checkpoint, *sample_parameters(seq)),
        )
        return str(rows[0].id) if rows else None

    def request(self, request_id: str, *, tenant: str) -> Payload:
        """What was asked for with a sample; nothing is in it once its time is over.

        Raises:
            NotFound: There is no such sample, or it is another tenant's.
        """
        rows = self._database.read(
            "SELECT payload, payload_blob, payload_bytes FROM operation"
            " WHERE request_id = ? AND tenant = ? AND kind = 'sample'",
            (request_id, tenant),
        )
        if not rows:
            raise NotFound(f"no call {request_id!r}")
        return Payload(inline=rows[0].payload, blob=rows[0].payload_blob, blob_bytes=rows[0].payload_bytes)

    def run_sampled_before(self, session_id: str, *, run: str, seq: int) -> str | None:
        """The path of that checkpoint of a run from which a sample of this number was accepted."""
        prefix = f"tinker://{run}/"
        rows = self._database.read(
            "SELECT s.checkpoint FROM sampling_session s"
            f" WHERE s.session = ? AND SUBSTR(s.checkpoint, 1, ?) = ? AND {has_sample('s.id')} LIMIT 1",
            (session_id, len(prefix), prefix, *sample_parameters(seq)),
        )
        return str(rows[0].checkpoint) if rows else None

    def sampled_weights_before(self, adapter: str, *, seq: int) -> str | None:
        """The sampling session on an adapter's nameless weights, still open, that has a sample of this number."""
        rows = self._database.read(
            "SELECT e.sampling_session FROM ephemeral_weights e WHERE e.adapter = ? AND e.ended_at IS NULL"
            f" AND {has_sample('e.sampling_session')} LIMIT 1",
            (adapter, *sample_parameters(seq)),
        )
        return str(rows[0].sampling_session) if rows else None

    def all_of(self, session_id: str) -> list[str]:
        """The ids of a session's sampling sessions."""
        rows = self._database.read("SELECT id FROM sampling_session WHERE session = ?", (session_id,))
        return [row.id for row in rows]

    # -- clients and their samples -------------------------------------------------------------------------------------

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
            if row is None:
                return self._was_forgotten(request_id, tenant)
            if row.tenant != tenant:
                raise NotFound(f"no future {request_id!r}")
            if row.kind != OperationKind.SAMPLE:
                raise InvalidInput(
                    "request_id", f"a {row.kind} cannot be cancelled once it is accepted; only samples can"
                )
            lock_lanes(transaction, [row.lane])
            return _cancel(transaction, row.lane, request_id, self._clock.now())

    def _was_forgotten(self, request_id: str, tenant: str) -> bool:
        """False, of one that ended long ago."""
        if owners_of_forgotten(self._database, [request_id]).get(request_id) != tenant:
            raise NotFound(f"no future {request_id!r}")
        return False

    def cancel_all(self, session_id: str, tenant: str) -> list[str]:
        """End all samples of a session that have not ended; their futures."""
        return self._cancel_those("s.session = ? AND s.tenant = ?", (session_id, tenant))

    def cancel_all_of(self, tenant: str) -> list[str]:
        """End all samples of a tenant that have not ended; their futures."""
        return self._cancel_those("s.tenant = ?", (tenant,))

    def _cancel_those(self, of: str, parameters: tuple[str, ...]) -> list[str]:
        rows = self._database.read(
            "SELECT o.request_id, o.lane FROM sampling_session s JOIN lane l ON l.id = s.id"
            " JOIN operation o ON o.mesh = l.mesh AND o.lane = l.id AND o.kind = 'sample'"
            f" AND o.state IN ('queued', 'running') WHERE {of} ORDER BY o.lane",
            parameters,
        )
        with self._database.transaction() as transaction:
            lock_lanes(transaction, {row.lane for row in rows})
            now = self._clock.now()
            return [row.request_id for row in rows if _cancel(transaction, row.lane, row.request_id, now)]

    def ended(self, sampling_session: str, *, client: int, after: int, limit: int) -> list[EndedSample]:
        """One client's samples with an ``ended_no`` above ``after``, in the order in which they ended."""
        first_seq = client * SEQS_PER_CLIENT
        rows = self._database.read(
            "SELECT request_id, ended_no, state, result_bytes FROM operation"
            " WHERE lane = ? AND ended_no > ? AND seq >= ? AND seq < ? ORDER BY ended_no LIMIT ?",
            (sampling_session, after, first_seq, first_seq + SEQS_PER_CLIENT, limit),
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
            first_seq = poll.client * SEQS_PER_CLIENT
            parameters += [place, poll.lane, poll.after, first_seq, first_seq + SEQS_PER_CLIENT]
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

    # -- weights without a name ----------------------------------------------------------------------------------------

    def to_pin(self, mesh: str, *, older_than_s: float) -> list[tuple[str, int]]:
        """Some of those that are open for so long and without a recovery point of their own, the oldest first."""
        rows = self._database.read(
            "SELECT e.adapter, e.seq FROM ephemeral_weights e JOIN lane l ON l.id = e.adapter"
            " WHERE e.ended_at IS NULL AND NOT e.pinned AND e.opened_at <= ? AND l.mesh = ?"
            " ORDER BY e.opened_at, e.adapter LIMIT ?",
            (self._clock.now() - older_than_s, mesh, _MAX_TO_PIN),
        )
        return [(row.adapter, row.seq) for row in rows]

    def open_among(self, sampling_sessions: Collection[str]) -> set[tuple[str, int]]:
        """What those of these sessions that may go on sample from: adapter and operation."""
        rows = self._database.read(
            "SELECT adapter, seq FROM ephemeral_weights"
            f" WHERE sampling_session IN ({placeholders(sampling_sessions)}) AND ended_at IS NULL",
            tuple(sampling_sessions),
        )
        return {(row.adapter, row.seq) for row in rows}

    def note_use(self, sampling_sessions: Collection[str]) -> None:
        """Note that these were sampled from just now."""
        if not sampling_sessions:
            return
        marks = placeholders(sampling_sessions)
        with self._database.transaction() as transaction:
            transaction.execute(
                f"UPDATE ephemeral_weights SET used_at = ? WHERE sampling_session IN ({marks})",
                (self._clock.now(), *sorted(sampling_sessions)),
            )

    def end_unreachable(self, patience: Patience) -> int:
        """End those that nobody can or does sample from any more, and for which no sample waits; how many.

        A job's stay until it has ended, however long it is paused.
        """
        now = self._clock.now()
        causes: list[tuple[str, str, tuple[object, ...]]] = [
            (
                "its client's session was finished",
                "EXISTS (SELECT 1 FROM session s WHERE s.id = ephemeral_weights.session AND s.finished_at IS NOT NULL)",
                (),
            ),
            (
                f"its client's session had not been heard of for {patience.silent_s:.0f} s",
                "EXISTS (SELECT 1 FROM session s WHERE s.id = ephemeral_weights.session AND s.heartbeat_at <= ?)",
                (now - patience.silent_s,),
            ),
            (
                f"nobody had sampled from it for {patience.idle_s:.0f} s{KEEP}",
                "used_at <= ?",
                (now - patience.idle_s,),
            ),
            ("its time to live was over", "expires_at <= ?", (now,)),
        ]
        num_ended = 0
        for reason, condition, parameters in causes:
            with self._database.transaction() as transaction:
                num_ended += transaction.execute(
                    "UPDATE ephemeral_weights SET ended_at = ?, end_reason = ?"
                    f" WHERE ended_at IS NULL AND {condition}{NOTHING_WAITS} AND NOT {_HELD_FOR_JOB}",
                    (now, reason, *parameters),
                ).rowcount
        return num_ended


def _cancel(transaction: Transaction, lane: str, request_id: str, now: float) -> bool:
    """End a sample of a locked lane; false when it has ended already."""
    changed = transaction.execute(
        "UPDATE operation SET state = 'failed', error = ?, error_category = ?, error_code = ?, finished_at = ?"
        " WHERE request_id = ? AND state IN ('queued', 'running')",
        (_CANCELLED_TEXT, FailureCategory.USER.value, Cancelled.code, now, request_id),
    ).rowcount
    if changed == 1:
        number_ended_sample(transaction, lane, request_id)
    return changed == 1


def _sampling_session_of(row: Row) -> SamplingSession:
    weights = None
    if row.adapter is not None:
        weights = EphemeralWeights(
            adapter=row.adapter, seq=row.seq, is_current=row.head_seq == row.seq + 1, end_reason=row.end_reason
        )
    return SamplingSession(
        id=row.id,
        tenant=row.tenant,
        session=row.session,
        base_model=row.base_model,
        model_path=row.model_path,
        checkpoint=row.checkpoint,
        content=row.content,
        generation=row.generation,
        weights=weights,
    )
