"""Lanes: the order of one adapter's operations, how they get into it, and how its head moves on.

Rows of lanes are locked before anything about them is decided. ``journal.py`` opens the transactions; so does whoever
brings operations of the service's own, which are numbered by the journal: rewinds, unloadings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from twinkle.core.errors import Conflict, Expired, InvalidInput, NotFound, UserError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, FailureCategory, OperationKind, OperationState, Outcome, Submission
from twinkle.storage.database import Asked, Transaction, placeholders, raised
from twinkle.storage.journal.forgotten import gone_lanes, is_forgotten, why_forgotten, why_lane_is_gone

NO_MESH = ""
"""The mesh of a lane that nobody executes: its operations are complete when they are accepted."""

_REQUESTED = "requested_at = CASE WHEN requested_at IS NULL THEN NULL ELSE ? END"
"""Lanes that are no training runs have none, and stand in no list."""
MAX_NUMBERS_AHEAD = 10_000
"""How far a number may run ahead of its lane: a hole is filled number by number when nobody comes to fill it."""


@dataclass(kw_only=True)
class LockedLane:
    """A lane's row, locked by the current transaction."""

    id: str
    tenant: str
    mesh: str
    ordered: bool
    head_seq: int
    head_kind: str | None
    max_seq: int
    vtime: float
    gap_since: float | None
    num_rewinds: int
    unload_seq: int | None
    arrival_numbered: bool
    gone_seq: int
    """No operation above this number has been forgotten."""

    @property
    def next_seq(self) -> int:
        """The number behind everything the lane has seen."""
        return max(self.max_seq + 1, self.head_seq)

    @property
    def is_unloaded(self) -> bool:
        """Whether the operation that ends the adapter has ended itself."""
        return self.unload_seq is not None and self.head_seq > self.unload_seq

    def note_arrival(self, transaction: Transaction, submission: Submission, now: float) -> None:
        """Bring the lane's head and gap up to date with a new operation."""
        self.max_seq = max(self.max_seq, submission.seq)
        if submission.seq == self.head_seq:
            self.head_kind = submission.kind.value
            transaction.execute(
                f"UPDATE lane SET head_kind = ?, max_seq = ?, {_REQUESTED}, gap_since = NULL WHERE id = ?",
                (self.head_kind, self.max_seq, now, self.id),
            )
        elif self.head_kind is None:
            transaction.execute(
                f"UPDATE lane SET max_seq = ?, {_REQUESTED}, gap_since = COALESCE(gap_since, ?) WHERE id = ?",
                (self.max_seq, now, now, self.id),
            )
        else:
            transaction.execute(f"UPDATE lane SET max_seq = ?, {_REQUESTED} WHERE id = ?", (self.max_seq, now, self.id))


def unloaded_error(adapter: str) -> InvalidInput:
    """Why nothing more can be done with an adapter that was unloaded."""
    return InvalidInput("model_id", f"{adapter} was unloaded; make a new run of one of its checkpoints to go on")


def lock_lanes(transaction: Transaction, ids: Iterable[str]) -> dict[str, LockedLane]:
    """Lock the lanes' rows in the order of their ids; unknown ids are left out."""
    return locked_lanes(ask_for_lanes(transaction, ids))


def ask_for_lanes(transaction: Transaction, ids: Iterable[str]) -> Asked:
    """The same without waiting; :func:`locked_lanes` reads the answer."""
    ordered_ids = sorted(set(ids))
    return transaction.ask(
        "SELECT id, tenant, mesh, ordered, head_seq, head_kind, max_seq, vtime, gap_since, num_rewinds, unload_seq,"
        " arrival_numbered, gone_seq"
        f" FROM lane WHERE id IN ({placeholders(ordered_ids)}) ORDER BY id FOR UPDATE",
        ordered_ids,
    )


def locked_lanes(asked: Asked) -> dict[str, LockedLane]:
    """The lanes that :func:`ask_for_lanes` has locked."""
    return {
        row.id: LockedLane(
            id=row.id,
            tenant=row.tenant,
            mesh=row.mesh,
            ordered=row.ordered,
            head_seq=row.head_seq,
            head_kind=row.head_kind,
            max_seq=row.max_seq,
            vtime=row.vtime,
            gap_since=row.gap_since,
            num_rewinds=row.num_rewinds,
            unload_seq=row.unload_seq,
            arrival_numbered=bool(row.arrival_numbered),
            gone_seq=row.gone_seq,
        )
        for row in asked()
    }


def accept(
    transaction: Transaction, lanes: dict[str, LockedLane], submission: Submission, *, now: float
) -> Accepted | UserError:
    """Insert an operation into its lane, one of those that are locked; or say why not."""
    lane = lanes.get(submission.lane)
    is_theirs = lane is not None and lane.tenant == submission.tenant and lane.mesh != NO_MESH
    if lane is None and gone_lanes(transaction, [submission.lane]).get(submission.lane) == submission.tenant:
        return Expired(why_lane_is_gone(submission.lane))
    if lane is None or not is_theirs or bool(lane.ordered) != submission.kind.is_ordered:
        return NotFound(f"no adapter or sampling session {submission.lane!r}")
    if lane.unload_seq is not None and submission.seq >= lane.unload_seq:
        return unloaded_error(lane.id)
    if lane.ordered and submission.seq > max(lane.max_seq, lane.head_seq) + MAX_NUMBERS_AHEAD:
        return InvalidInput(
            "seq_id", f"{submission.seq} is more than {MAX_NUMBERS_AHEAD} ahead of the last number, {lane.max_seq}"
        )
    request_id = request_id_of(submission.lane, submission.seq)
    if submission.seq <= lane.gone_seq and is_forgotten(transaction, lane.id, submission.seq, ordered=lane.ordered):
        return answer_resend(transaction, lane, submission, request_id)
    inserted = transaction.execute(
        "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
        " payload, payload_blob, payload_bytes, rejection, num_tokens, num_prompt_tokens, num_sequences,"
        " request_key, device_s, expired, not_before, accepted_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, 'queued', 0, 0, ?, ?, ?, ?, ?, ?, ?, ?, 0, FALSE, 0, ?)"
        " ON CONFLICT (lane, seq) DO NOTHING",
        (
            request_id,
            submission.tenant,
            submission.lane,
            lane.mesh,
            submission.seq,
            submission.kind.value,
            submission.digest,
            submission.payload.inline,
            submission.payload.blob,
            submission.payload.size_bytes,
            submission.rejection,
            submission.num_tokens,
            submission.num_prompt_tokens,
            submission.num_sequences,
            submission.request_key,
            now,
        ),
    )
    if inserted.rowcount == 0:
        return answer_resend(transaction, lane, submission, request_id)
    if lane.ordered:
        lane.note_arrival(transaction, submission, now)
    return Accepted(request_id=request_id, mesh=lane.mesh, is_new=True)


def accept_own(transaction: Transaction, lane: LockedLane, submission: Submission, *, now: float) -> Accepted:
    """Insert an operation of the service's own, whose number is the journal's."""
    answer = accept(transaction, {lane.id: lane}, submission, now=now)
    if isinstance(answer, UserError):
        raise answer
    return answer


def accept_complete(
    transaction: Transaction, lane: LockedLane, submission: Submission, *, result: bytes, now: float
) -> Accepted | UserError:
    """Insert an operation that nobody executes, together with its outcome: the result, or its rejection."""
    failure = submission.rejection
    request_id = request_id_of(submission.lane, submission.seq)
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
            submission.kind.value,
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
    return answer_resend(transaction, lane, submission, request_id)


def in_journal_numbers(transaction: Transaction, lanes: dict[str, LockedLane], submission: Submission) -> Submission:
    """A client counts its own operations; the rewinds between them have numbers of the journal too."""
    lane = lanes.get(submission.lane)
    if lane is None or lane.num_rewinds == 0:
        return submission
    return replace(submission, seq=journal_seq(transaction, lane.id, submission.seq))


def answer_resend(
    transaction: Transaction, lane: LockedLane, submission: Submission, request_id: str
) -> Accepted | UserError:
    """The answer to a number that was used before: its own future, that it is another request's, or that it is gone."""
    row = transaction.execute(
        "SELECT digest, kind FROM operation WHERE lane = ? AND seq = ?", (submission.lane, submission.seq)
    ).fetchone()
    if row is None:
        return Expired(why_forgotten(request_id))
    if row.digest == submission.digest or row.kind == OperationKind.GAP:
        return Accepted(request_id=request_id, mesh=lane.mesh, is_new=False)
    return Conflict(
        f"seq_id {submission.seq} of {submission.lane} was already used for a different {row.kind} request; "
        "a resend must carry the same body, a new request the next number",
        request_id=request_id,
    )


def advance_lane(
    transaction: Transaction, lane: LockedLane, outcome: Outcome, now: float, *, least_vtime: float = 0.0
) -> None:
    """Move the head on, and the lane's virtual time from ``least_vtime`` on by what was served.

    The window of failed gradients opens at a failed forward_backward and closes at what empties the gradients.
    """
    assert lane.head_seq == outcome.seq, f"{outcome.lane} is at {lane.head_seq}, not at {outcome.seq}"
    window_parameters: list[int] = []
    if outcome.kind in {OperationKind.FORWARD_BACKWARD, OperationKind.GAP} and outcome.failure is not None:
        window, window_parameters = "COALESCE(failed_window_seq, ?)", [outcome.seq]
    elif _closes_window(outcome):
        window = "NULL"
    else:
        window = "failed_window_seq"
    next_seq = outcome.seq + 1
    transaction.execute(
        "UPDATE lane SET head_seq = ?,"
        " head_kind = (SELECT o.kind FROM operation o WHERE o.lane = lane.id AND o.seq = ?),"
        " gap_since = CASE WHEN max_seq >= ? AND NOT EXISTS"
        " (SELECT 1 FROM operation o WHERE o.lane = lane.id AND o.seq = ?) THEN CAST(? AS DOUBLE PRECISION) END,"
        f" failed_window_seq = {window}, not_before = 0,"
        f" vtime = {raised('vtime')} + ?"
        " WHERE id = ? AND head_seq = ?",
        (
            next_seq,
            next_seq,
            next_seq,
            next_seq,
            now,
            *window_parameters,
            least_vtime,
            least_vtime,
            float(outcome.charge),
            outcome.lane,
            outcome.seq,
        ),
    )
    lane.head_seq = next_seq


def end_sample(transaction: Transaction, outcome: Outcome, *, least_vtime: float) -> None:
    """Number a sample that has ended, and move its lane's virtual time from ``least_vtime`` on by what was served."""
    transaction.execute(
        f"UPDATE lane SET vtime = {raised('vtime')} + ? WHERE id = ?",
        (least_vtime, least_vtime, float(outcome.charge), outcome.lane),
    )
    number_ended_sample(transaction, outcome.lane, outcome.request_id)


def number_ended_sample(transaction: Transaction, lane: str, request_id: str) -> None:
    """Give an ended sample its place among those of its lane, which the transaction has locked."""
    transaction.execute("UPDATE lane SET num_ended = num_ended + 1 WHERE id = ?", (lane,))
    transaction.execute(
        "UPDATE operation SET ended_no = (SELECT num_ended FROM lane WHERE id = ?) WHERE request_id = ?",
        (lane, request_id),
    )


def _closes_window(outcome: Outcome) -> bool:
    """Whether the adapter's gradients are empty afterwards, so that earlier failures no longer count."""
    if outcome.kind is OperationKind.OPTIM_STEP:
        return outcome.failure is None or outcome.failure.code == "window_failed"
    if outcome.clears_gradients:
        return True
    return outcome.kind in {OperationKind.LOAD_WEIGHTS, OperationKind.REWIND} and outcome.failure is None


def journal_seq(transaction: Transaction, lane: str, client_seq: int) -> int:
    """The number in the journal of what a client numbered ``client_seq``: higher by the rewinds that stand before it.

    A rewind is numbered behind everything its lane had seen, so no number that was given before it moves.
    """
    rewinds = transaction.execute(
        "SELECT seq FROM branch WHERE adapter = ? AND source = ? ORDER BY seq", (lane, lane)
    ).fetchall()
    return shifted(client_seq, [rewind.seq for rewind in rewinds])


def shifted(client_seq: int, rewinds: Iterable[int]) -> int:
    """The same, of the rewinds' numbers in order."""
    seq = client_seq
    for rewind in rewinds:
        if seq < rewind:
            break
        seq += 1
    return seq
