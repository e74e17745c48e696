"""The journal: the record of operations and their outcomes, and the only truth.

Every method is one short transaction. A lane's row is always locked before its operations are touched, lanes in the
order of their ids: under READ COMMITTED a sub-select that waited for a lock would otherwise read an old snapshot, and
two batches could lock each other out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound, UserError
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.core.operation import (
    Accepted,
    Claim,
    Failure,
    OperationKind,
    OperationState,
    Outcome,
    Submission,
    Unnumbered,
)
from twinkle.core.process.crash import crash_point
from twinkle.storage.database import Database, Transaction, placeholders
from twinkle.storage.journal.answers import PAST_COLUMNS, OwnedStatus, failure_of, past_of, read_statuses
from twinkle.storage.journal.arrivals import accept_next, accept_numbered
from twinkle.storage.journal.executing import (
    Committed,
    Waiting,
    ask_for_lease,
    charge,
    check_lease,
    free_followers,
    held_since,
    read_waiting,
    record_outcomes,
    start_operations,
)
from twinkle.storage.journal.forgotten import refuse_gone
from twinkle.storage.journal.lanes import (
    NO_MESH,
    LockedLane,
    accept,
    accept_complete,
    advance_lane,
    ask_for_lanes,
    end_sample,
    lock_lanes,
    locked_lanes,
)
from twinkle.storage.journal.records import NewLane, PastOperation, Records
from twinkle.storage.journal.turns import (
    Choose,
    Followed,
    Moment,
    ask_who_is_ready,
    move_virtual_time,
    ready_heads,
    waiting_samples,
)


class Journal:
    """Append, claim, commit, ask."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores.

        Args:
            database: Where the journal is.
            clock: What time it is.
            limits: Those of tenants that have none of their own.
        """
        self.database = database
        self._clock = clock
        self._limits = limits

    # -- accepting ----------------------------------------------------------------------------------------------------

    def append(self, submissions: Sequence[Submission | Unnumbered]) -> list[Accepted | UserError]:
        """Accept operations in one transaction; the answers stand in the order of the submissions.

        A resend (same lane, number or key, and digest) gets the same future. ``NotFound`` (no such lane, or another
        tenant's), ``Conflict`` (the number or the key was used for another request) and ``InvalidInput`` (a number from
        nowhere, a run of the other dialect) are returned, not raised: one bad submission does not undo its neighbours.
        """
        with self.database.transaction() as transaction:
            lanes = lock_lanes(transaction, (submission.lane for submission in submissions))
            now = self._clock.now()
            answers = [
                accept_next(transaction, lanes, submission, now=now)
                if isinstance(submission, Unnumbered)
                else accept_numbered(transaction, lanes, submission, now=now)
                for submission in submissions
            ]
            crash_point("journal.append")
        return answers

    def open_lane(self, lane: NewLane, submission: Submission | None = None) -> Accepted | None:
        """Create an adapter or a sampling session together with its first operation.

        Doing it again changes nothing and answers the same.

        Raises:
            Conflict: The id exists with another first operation.
            NotFound: The id exists and is another tenant's.
        """
        with self.database.transaction() as transaction:
            lane.insert(transaction)
            lanes = lock_lanes(transaction, [lane.id])
            if lanes[lane.id].tenant != lane.tenant:
                raise NotFound(f"no adapter or sampling session {lane.id!r}")
            if submission is None:
                return None
            answer = accept(transaction, lanes, submission, now=self._clock.now())
        if isinstance(answer, UserError):
            raise answer
        return answer

    def record_loss(self, submission: Submission, *, result: bytes) -> Accepted:
        """Accept a custom loss, or its rejection, and complete its future; doing it again answers the same.

        A loss is numbered within its session, and what defines it is its payload, which is kept as long as the journal
        itself: any ``forward_backward`` that names it may be replayed, also when the session has long lapsed.

        Raises:
            Conflict: The number was used for another loss.
            NotFound: The lane is another tenant's.
            Expired: The session's losses are forgotten.
        """
        with self.database.transaction() as transaction:
            refuse_gone(transaction, submission.lane)
            transaction.execute(
                "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
                " VALUES (?, ?, ?, FALSE, 0, -1, 0, 0) ON CONFLICT (id) DO NOTHING",
                (submission.lane, submission.tenant, NO_MESH),
            )
            lane = lock_lanes(transaction, [submission.lane])[submission.lane]
            if lane.tenant != submission.tenant:
                raise NotFound(f"no session of lane {submission.lane!r}")
            answer = accept_complete(transaction, lane, submission, result=result, now=self._clock.now())
        if isinstance(answer, UserError):
            raise answer
        return answer

    # -- executing ----------------------------------------------------------------------------------------------------

    def waiting(self, lease: Lease) -> Waiting:
        """What :meth:`claim` and :meth:`claim_samples` may find: to be asked first, since it makes no writer wait.

        Raises:
            LeaseLost: Another epoch holds the mesh.
        """
        return read_waiting(self.database, lease)

    def claim(
        self,
        lease: Lease,
        choose: Choose,
        limit: int,
        *,
        held: Collection[str] = (),
        followed: Collection[Followed] = (),
    ) -> list[Claim]:
        """Hand the chosen heads of ready lanes to the lease holder, and what stands behind those in its hands.

        Args:
            lease: The caller's lease; its epoch is written on every claimed operation.
            choose: The scheduler's decision: some of the given heads, tenants being in the order of what they were
                served.
            limit: How many heads to offer.
            held: Lanes that are not to be offered: the caller works on their heads, or they wait for something else.
            followed: Those of them of which more may be claimed before what the caller works on has ended.

        Raises:
            LeaseLost: Another epoch holds the mesh.
        """
        with self.database.transaction(together=True) as transaction:
            asked, now = ask_for_lease(transaction, lease), self._clock.now()
            ready = ask_who_is_ready(transaction, lease.mesh, now=now, limit=limit, followed=followed)
            moment = self._moment(lease, held_since(asked, lease), now)
            heads = ready_heads(transaction, moment, ready, limit=limit, held=held, followed=followed)
            choice = choose(heads)
            move_virtual_time(transaction, moment, choice.vtime)
            free_followers(transaction, lease, [head for head in choice.heads if head.was_lost])
            started = start_operations(transaction, lease, [head.request_id for head in choice.heads], now=moment.now)
        return started()

    def claim_samples(self, lease: Lease, choose: Choose, limit: int, *, under_way: Collection[str]) -> list[Claim]:
        """Hand the chosen samples to the lease holder; one that nobody works on counts as waiting.

        Args:
            lease: The caller's lease.
            choose: The scheduler's decision: some of the given samples, which stand in the order of their arrival.
            limit: How many may be offered at most.
            under_way: The samples the caller works on. Any other that runs was claimed by a holder that is gone, or by
                this one in a transaction whose answer it never saw.

        Raises:
            LeaseLost: Another epoch holds the mesh.
        """
        with self.database.transaction() as transaction:
            moment = self._moment(lease, check_lease(transaction, lease), self._clock.now())
            samples = waiting_samples(transaction, moment, limit=limit, under_way=under_way)
            if not samples:
                return []
            choice = choose(samples)
            move_virtual_time(transaction, moment, choice.vtime)
            chosen = [sample.request_id for sample in choice.heads]
            started = start_operations(transaction, lease, chosen, now=moment.now)
        return started()

    def _moment(self, lease: Lease, vtime: float, now: float) -> Moment:
        return Moment(mesh=lease.mesh, epoch=lease.epoch, vtime=vtime, now=now, max_running=self._limits.max_running)

    def commit(
        self, lease: Lease, outcomes: Sequence[Outcome], records: Mapping[str, Records] = MappingProxyType({})
    ) -> Committed:
        """Record outcomes and what they brought into being, under the lease's fence; which of them were recorded.

        Args:
            lease: The caller's lease.
            outcomes: Of operations it had claimed; those of one lane in the order of their numbers. What follows one
                that is not taken is not taken either: it was made of a state that never was.
            records: What each brings into being, by its future; inserted with the outcome or not at all.

        Raises:
            LeaseLost: Another epoch holds the mesh; nothing was written.
        """
        with self.database.transaction(together=True) as transaction:
            lease_asked = ask_for_lease(transaction, lease)
            lanes_asked = ask_for_lanes(transaction, (outcome.lane for outcome in outcomes))
            now = self._clock.now()
            committed = record_outcomes(transaction, lease, outcomes, now)
            mesh_vtime, lanes = held_since(lease_asked, lease), locked_lanes(lanes_asked)
            least = self._charge(transaction, lease, committed.recorded, lanes, mesh_vtime)
            for outcome in committed.recorded:
                lane = lanes[outcome.lane]
                least_vtime = least[lane.tenant]
                if outcome.kind.is_ordered:
                    advance_lane(transaction, lane, outcome, now, least_vtime=least_vtime)
                else:
                    end_sample(transaction, outcome, least_vtime=least_vtime)
                if outcome.request_id in records:
                    records[outcome.request_id].insert(transaction, now)
            crash_point("journal.commit")
        return committed

    def charge(self, lease: Lease, outcomes: Sequence[Outcome]) -> None:
        """Charge for operations that others have ended while the caller worked on them. Nothing else is written.

        Raises:
            LeaseLost: Another epoch holds the mesh.
        """
        with self.database.transaction() as transaction:
            mesh_vtime = check_lease(transaction, lease)
            lanes = lock_lanes(transaction, (outcome.lane for outcome in outcomes))
            self._charge(transaction, lease, outcomes, lanes, mesh_vtime)

    def _charge(
        self,
        transaction: Transaction,
        lease: Lease,
        outcomes: Sequence[Outcome],
        lanes: Mapping[str, LockedLane],
        mesh_vtime: float,
    ) -> dict[str, float]:
        return charge(
            transaction,
            lease.mesh,
            outcomes,
            lanes,
            mesh_vtime=mesh_vtime,
            now=self._clock.now(),
            tokens_per_minute=self._limits.tokens_per_minute,
        )

    def give_back(
        self,
        lease: Lease,
        request_ids: Sequence[str],
        *,
        delay_s: float = 0.0,
        is_blameless: bool = False,
        is_suspect: bool = False,
        is_unbegun: bool = False,
        reason: str | None = None,
    ) -> None:
        """Return claimed operations to the queue, to be offered again after ``delay_s``.

        Args:
            lease: The caller's lease.
            request_ids: What it had claimed.
            delay_s: How long they wait; their lanes wait with them.
            is_blameless: The attempt does not count: it was the worker that stopped, not the operation that failed.
            is_suspect: The operations themselves may be what went wrong.
            is_unbegun: They were claimed ahead, and what they were to follow on has not come to be. Their attempts do
                not count, and their lanes' heads wait for nothing.
            reason: What its owner is told of the attempt while it waits for the next one.

        Raises:
            LeaseLost: Another epoch holds the mesh; it has them already.
        """
        if not request_ids:
            return
        not_before = self._clock.now() + delay_s
        marks = placeholders(request_ids)
        with self.database.transaction() as transaction:
            check_lease(transaction, lease)
            lanes = transaction.execute(f"SELECT lane FROM operation WHERE request_id IN ({marks})", request_ids)
            lock_lanes(transaction, (row.lane for row in lanes.fetchall()))
            rows = transaction.execute(
                "UPDATE operation SET state = 'queued', claim_epoch = 0, attempts = attempts - ?,"
                " suspicions = suspicions + ?, not_before = ?,"
                f" error = ? WHERE request_id IN ({marks}) AND state = 'running' AND claim_epoch = ? AND mesh = ?"
                " RETURNING lane",
                (
                    int(is_blameless or is_unbegun),
                    int(is_suspect),
                    0.0 if is_unbegun else not_before,
                    reason,
                    *request_ids,
                    lease.epoch,
                    lease.mesh,
                ),
            ).fetchall()
            if is_unbegun:
                return
            for lane in sorted({row.lane for row in rows}):
                transaction.execute("UPDATE lane SET not_before = ? WHERE id = ?", (not_before, lane))

    # -- asking -------------------------------------------------------------------------------------------------------

    def statuses(self, request_ids: Sequence[str]) -> dict[str, OwnedStatus]:
        """The futures that exist among ``request_ids``, or did; in one query, unless some have no row."""
        return read_statuses(self.database, request_ids)

    def failed_meanwhile(self, request_ids: Sequence[str]) -> dict[str, Failure]:
        """Those that were cancelled or are overdue: what a worker looks up between two slices of what it works on."""
        rows = self.database.read(
            "SELECT request_id, error, error_category, error_code FROM operation"
            f" WHERE request_id IN ({placeholders(request_ids)}) AND state = 'failed'",
            request_ids,
        )
        return {row.request_id: failure_of(row) for row in rows}

    def num_open_samples(self, tenant: str) -> int:
        """How many of the tenant's samples wait or run."""
        rows = self.database.read(
            "SELECT COUNT(*) AS num_open FROM operation"
            " WHERE kind = 'sample' AND state IN ('queued', 'running') AND tenant = ?",
            (tenant,),
        )
        return int(rows[0].num_open)

    def ready_meshes(self) -> list[str]:
        """The meshes that have work waiting: whom a sweep must nudge."""
        rows = self.database.read(
            "SELECT mesh FROM lane WHERE head_kind IS NOT NULL AND not_before <= ? GROUP BY mesh"
            " UNION SELECT mesh FROM operation WHERE kind = 'sample' AND state IN ('queued', 'running')"
            " AND claim_epoch = 0 AND not_before <= ? GROUP BY mesh",
            (self._clock.now(), self._clock.now()),
        )
        return [row.mesh for row in rows]

    def history(self, lane: str, *, after_seq: int, before_seq: int) -> list[PastOperation]:
        """A lane's finished operations with ``after_seq < seq < before_seq``, in order: what a replay needs."""
        rows = self.database.read(
            f"SELECT {PAST_COLUMNS} FROM operation"
            " WHERE lane = ? AND seq > ? AND seq < ? AND state IN ('done', 'failed') ORDER BY seq",
            (lane, after_seq, before_seq),
        )
        return [past_of(row) for row in rows]

    def some_of_history(self, lane: str, seqs: Sequence[int]) -> list[PastOperation]:
        """Those of a lane's finished operations that have these numbers, in order."""
        rows = self.database.read(
            f"SELECT {PAST_COLUMNS} FROM operation WHERE lane = ? AND seq IN ({placeholders(seqs)})"
            " AND state IN ('done', 'failed') ORDER BY seq",
            (lane, *seqs),
        )
        return [past_of(row) for row in rows]

    def loss_definition(self, lane: str, number: int) -> bytes | None:
        """What defines loss ``number`` of a session's lane; ``None`` when there is no such loss."""
        rows = self.database.read(
            "SELECT payload FROM operation WHERE request_id = ? AND kind = ? AND state = ?",
            (request_id_of(lane, number), OperationKind.CREATE_CUSTOM_LOSS.value, OperationState.DONE.value),
        )
        return None if not rows else bytes(rows[0].payload)
