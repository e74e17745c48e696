"""Lanes: the order of one adapter's operations. Their rows are locked before anything about them is decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput
from twinkle.core.operation import OperationKind, Outcome, Submission
from twinkle.storage.database import Transaction

NO_MESH = ""
"""The mesh of a lane that nobody executes: its operations are complete when they are accepted."""


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
                "UPDATE lane SET head_kind = ?, max_seq = ?, gap_since = NULL WHERE id = ?",
                (self.head_kind, self.max_seq, self.id),
            )
        elif self.head_kind is None:
            transaction.execute(
                "UPDATE lane SET max_seq = ?, gap_since = COALESCE(gap_since, ?) WHERE id = ?",
                (self.max_seq, now, self.id),
            )
        else:
            transaction.execute("UPDATE lane SET max_seq = ? WHERE id = ?", (self.max_seq, self.id))


def unloaded_error(adapter: str) -> InvalidInput:
    """Why nothing more can be done with an adapter that was unloaded."""
    return InvalidInput("model_id", f"{adapter} was unloaded; make a new run of one of its checkpoints to go on")


def lock_lanes(transaction: Transaction, ids: Iterable[str]) -> dict[str, LockedLane]:
    """Lock the lanes' rows in the order of their ids; unknown ids are left out."""
    ordered_ids = sorted(set(ids))
    rows = transaction.execute(
        "SELECT id, tenant, mesh, ordered, head_seq, head_kind, max_seq, vtime, gap_since, num_rewinds, unload_seq"
        f" FROM lane WHERE id IN ({placeholders(ordered_ids)}) ORDER BY id FOR UPDATE",
        ordered_ids,
    ).fetchall()
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
        )
        for row in rows
    }


def advance_lane(transaction: Transaction, outcome: Outcome, now: float, *, least_vtime: float = 0.0) -> None:
    """Move the head on, and the lane's virtual time from ``least_vtime`` on by what was served.

    The window of failed gradients opens at a failed forward_backward and closes at what empties the gradients.
    """
    window_parameters: list[int] = []
    if outcome.kind in {OperationKind.FORWARD_BACKWARD, OperationKind.GAP} and outcome.failure is not None:
        window, window_parameters = "COALESCE(failed_window_seq, ?)", [outcome.seq]
    elif _closes_window(outcome):
        window = "NULL"
    else:
        window = "failed_window_seq"
    next_seq = outcome.seq + 1
    changed = transaction.execute(
        "UPDATE lane SET head_seq = ?,"
        " head_kind = (SELECT o.kind FROM operation o WHERE o.lane = lane.id AND o.seq = ?),"
        " gap_since = CASE WHEN max_seq >= ? AND NOT EXISTS"
        " (SELECT 1 FROM operation o WHERE o.lane = lane.id AND o.seq = ?) THEN CAST(? AS DOUBLE PRECISION) END,"
        f" failed_window_seq = {window}, not_before = 0,"
        " vtime = CASE WHEN vtime < ? THEN CAST(? AS DOUBLE PRECISION) ELSE vtime END + ?"
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
    ).rowcount
    assert changed == 1, f"{outcome.lane} has moved past {outcome.seq}, which had not ended"


def end_sample(transaction: Transaction, outcome: Outcome, *, least_vtime: float) -> None:
    """Number a sample that has ended, and move its lane's virtual time from ``least_vtime`` on by what was served."""
    transaction.execute(
        "UPDATE lane SET vtime = CASE WHEN vtime < ? THEN CAST(? AS DOUBLE PRECISION) ELSE vtime END + ? WHERE id = ?",
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
    return outcome.kind in {OperationKind.LOAD_WEIGHTS, OperationKind.REWIND} and outcome.failure is None


def journal_seq(transaction: Transaction, lane: str, client_seq: int) -> int:
    """The number in the journal of what a client numbered ``client_seq``: higher by the rewinds that stand before it.

    A rewind is numbered behind everything its lane had seen, so no number that was given before it moves.
    """
    rewinds = transaction.execute(
        "SELECT seq FROM branch WHERE adapter = ? AND source = ? ORDER BY seq", (lane, lane)
    ).fetchall()
    seq = client_seq
    for rewind in rewinds:
        if seq < rewind.seq:
            break
        seq += 1
    return seq


def placeholders(values: Collection[object]) -> str:
    """The inside of an ``IN (...)``; of nothing it is ``NULL``, which nothing equals, since ``IN ()`` is an error."""
    return ", ".join("?" * len(values)) or "NULL"
