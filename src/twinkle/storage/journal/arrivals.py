"""Lanes whose operations the journal numbers, in the order of their arrival, and those that are not of the kind.

A run is trained through the dialect that made it: the clients of one number their operations themselves and wait for
futures, those of the other do neither.
"""

from __future__ import annotations

from twinkle.core.errors import Conflict, Expired, InvalidInput, NotFound, UserError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, Submission, Unnumbered
from twinkle.storage.database import Database, Transaction
from twinkle.storage.journal.forgotten import (
    gone_lanes,
    number_of_key,
    owners_of_forgotten,
    seq_of_key,
    why_forgotten,
    why_lane_is_gone,
)
from twinkle.storage.journal.lanes import NO_MESH, LockedLane, accept, in_journal_numbers, shifted

_INSTEAD = "read it, sample it, or fork it for this one (or load one of its checkpoints into a run of this one)"


def accept_numbered(
    transaction: Transaction, lanes: dict[str, LockedLane], submission: Submission, *, now: float
) -> Accepted | UserError:
    """Insert an operation that its client has numbered; or say why not."""
    lane = lanes.get(submission.lane)
    if lane is not None and lane.tenant == submission.tenant and lane.arrival_numbered:
        return InvalidInput(
            "model_id",
            f"{lane.id} was made through the Twinkle dialect, and a run is trained through the dialect that made it;"
            f" {_INSTEAD}",
        )
    return accept(transaction, lanes, in_journal_numbers(transaction, lanes, submission), now=now)


def accept_next(
    transaction: Transaction, lanes: dict[str, LockedLane], request: Unnumbered, *, now: float
) -> Accepted | UserError:
    """Insert a request as its lane's next operation, unless its key has been there; or say why not."""
    lane = lanes.get(request.lane)
    if lane is None and gone_lanes(transaction, [request.lane]).get(request.lane) == request.tenant:
        return Expired(why_lane_is_gone(request.lane))
    if lane is None or lane.tenant != request.tenant or not lane.ordered or lane.mesh == NO_MESH:
        return NotFound(f"no adapter {request.lane!r}")
    if not lane.arrival_numbered:
        return InvalidInput(
            "adapter_name",
            f"{lane.id} was made through the Tinker dialect, and a run is trained through the dialect that made it;"
            f" {_INSTEAD}",
        )
    earlier = _answer_key(transaction, lane, request)
    return earlier or accept(transaction, lanes, request.at(lane.next_seq), now=now)


def _answer_key(transaction: Transaction, lane: LockedLane, request: Unnumbered) -> Accepted | UserError | None:
    """The answer to a key that was used before: its own future, that it is another request's, or that it is gone."""
    if request.request_key is None:
        return None
    row = transaction.execute(
        "SELECT seq, digest, kind FROM operation WHERE lane = ? AND request_key = ?", (lane.id, request.request_key)
    ).fetchone()
    if row is None:
        seq = None if lane.gone_seq < 0 else seq_of_key(transaction, lane.id, request.request_key)
        return None if seq is None else Expired(why_forgotten(request_id_of(lane.id, seq)))
    request_id = request_id_of(lane.id, row.seq)
    if row.digest == request.digest:
        return Accepted(request_id=request_id, mesh=lane.mesh, is_new=False)
    return Conflict(
        f"the idempotency key {request.request_key!r} was used for a different {row.kind} request of {lane.id};"
        " a resend must carry the same body, a new request a key of its own",
        request_id=request_id,
    )


class Arrivals:
    """Whether something was accepted before. It does not say whether a resend is the same request."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def has(self, submission: Submission | Unnumbered) -> bool:
        """Whether there is an operation of this number or key, or was one that is forgotten."""
        if isinstance(submission, Submission):
            rewinds = self._database.read(
                "SELECT seq FROM branch WHERE adapter = ? AND source = ? ORDER BY seq",
                (submission.lane, submission.lane),
            )
            seq = shifted(submission.seq, [row.seq for row in rewinds])
            return self.has_number(submission.tenant, submission.lane, seq)
        key = submission.request_key
        if key is None or not self.has_lane(submission.tenant, submission.lane):
            return False
        return bool(
            self._database.read(
                "SELECT 1 AS one FROM operation WHERE lane = ? AND request_key = ?"
                " UNION ALL SELECT 1 FROM forgotten WHERE lane = ? AND number = ?",
                (submission.lane, key, submission.lane, number_of_key(key)),
            )
        )

    def has_number(self, tenant: str, lane: str, seq: int) -> bool:
        """The same of a number as the journal counts."""
        request_id = request_id_of(lane, seq)
        rows = self._database.read("SELECT tenant FROM operation WHERE request_id = ?", (request_id,))
        if rows:
            return bool(rows[0].tenant == tenant)
        return owners_of_forgotten(self._database, [request_id]).get(request_id) == tenant

    def has_lane(self, tenant: str, lane: str) -> bool:
        """Whether the tenant has, or had, a run or a sampling session of this id."""
        return bool(
            self._database.read(
                "SELECT id FROM lane WHERE id = ? AND tenant = ?"
                " UNION ALL SELECT id FROM gone_lane WHERE id = ? AND tenant = ?",
                (lane, tenant, lane, tenant),
            )
        )
