"""Runs that take up a past state: forked into a new run, or rewound and gone on with.

Both are operations of the journal. A rewind is numbered behind everything its lane has seen, so that what was accepted
before it is executed before it; clients, who count their own operations alone, go on with their next number
(``lanes.journal_seq``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256

from twinkle.core.adapter import Dialect
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, Payload, Submission
from twinkle.storage.adapters.adapters import Adapter
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.lanes import LockedLane, accept_own, lock_lanes, unloaded_error
from twinkle.storage.journal.records import NewAdapter

_STATE_KINDS = "('create_model', 'load_weights', 'fork', 'rewind', 'optim_step')"
_IS_STEP = " AND kind = 'optim_step' AND state = 'done'"
# After these the gradients are empty: what a run may go back to.
_IS_STATE = f"kind IN {_STATE_KINDS} AND (state = 'done' OR kind = 'optim_step' AND error_code = 'window_failed')"


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Operation ``seq`` of ``adapter`` takes up what ``source`` was after its operation ``at``."""

    adapter: str
    seq: int
    source: str
    at: int
    created_at: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """The optimizer's ``number``-th step of a run, without those that a rewind has undone."""

    number: int
    seq: int
    finished_at: float


@dataclass(frozen=True, kw_only=True)
class _NewFork:
    """A run about to begin as another one was."""

    adapter: NewAdapter
    source: str
    at: int
    step: int | None

    @property
    def id(self) -> str:
        return self.adapter.id

    @property
    def tenant(self) -> str:
        return self.adapter.tenant

    def insert(self, transaction: Transaction) -> None:
        """Insert the run and where it comes from, unless it exists; the past state stays until the fork has ended."""
        lane = lock_lanes(transaction, [self.source]).get(self.source)
        if lane is None:
            raise NotFound(f"no training run {self.source!r}")
        if transaction.execute("SELECT id FROM lane WHERE id = ?", (self.id,)).fetchone() is not None:
            return
        if lane.unload_seq is not None:
            raise unloaded_error(self.source)
        _check_reachable(transaction, lane, self.at)
        self.adapter.insert(transaction)
        branch = Branch(adapter=self.id, seq=0, source=self.source, at=self.at, created_at=self.adapter.created_at)
        _insert_branch(transaction, branch, step=self.step, request_key=None)


class Branches:
    """Forks, rewinds, and what there is to go back to."""

    def __init__(self, database: Database, journal: Journal, clock: Clock) -> None:
        self._database = database
        self._journal = journal
        self._clock = clock

    def fork(self, adapter: NewAdapter, *, source: str, at: int, step: int | None = None) -> Accepted:
        """Begin a run as ``source`` was after operation ``at``. Doing it again answers the same.

        ``step`` is remembered: by which step of the optimizer the operation was asked for, if it was.

        Raises:
            NotFound: ``source`` was forgotten.
            InvalidInput: That state cannot be had (any more).
            Conflict: There is a run of this id, and it began otherwise.
        """
        submission = _submission(adapter.tenant, adapter.id, 0, OperationKind.FORK, source, at)
        accepted = self._journal.open_lane(_NewFork(adapter=adapter, source=source, at=at, step=step), submission)
        assert accepted is not None, "a lane opened with an operation answers with its ticket"
        return accepted

    def rewind(
        self, adapter: str, tenant: str, *, at: int, request_key: str | None, step: int | None = None
    ) -> Accepted:
        """Let a run go on as it was after operation ``at``, behind everything that was accepted before.

        Args:
            adapter: The run.
            tenant: Whose it is.
            at: After which operation.
            request_key: Names this wish: a second time it is answered and not done again.
            step: By which step of the optimizer the operation was asked for, if it was; remembered with the key.

        Raises:
            NotFound: There is no such run.
            InvalidInput: That state cannot be had (any more).
            Conflict: The key was used for another wish.
        """
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [adapter]).get(adapter)
            if lane is None or lane.tenant != tenant or not lane.ordered:
                raise NotFound(f"no training run {adapter!r}")
            earlier = _branch_of_key(transaction, adapter, request_key)
            if earlier is not None:
                if earlier.adapter != adapter or earlier.at != at:
                    raise Conflict(f"the idempotency key was used to go back to operation {earlier.at} of {adapter}")
                return Accepted(request_id=request_id_of(adapter, earlier.seq), mesh=lane.mesh, is_new=False)
            if lane.unload_seq is not None:
                raise unloaded_error(adapter)
            _check_reachable(transaction, lane, at)
            seq = lane.next_seq
            branch = Branch(adapter=adapter, seq=seq, source=adapter, at=at, created_at=self._clock.now())
            _insert_branch(transaction, branch, step=step, request_key=request_key)
            transaction.execute("UPDATE lane SET num_rewinds = num_rewinds + 1 WHERE id = ?", (adapter,))
            submission = _submission(tenant, adapter, seq, OperationKind.REWIND, adapter, at)
            return accept_own(transaction, lane, submission, now=self._clock.now())

    # -- asking -------------------------------------------------------------------------------------------------------

    def origin(self, adapter: str) -> Branch | None:
        """Where a forked run comes from."""
        found = self._find("adapter = ? AND source <> adapter", adapter)
        return found[0] if found else None

    def rewinds(self, adapter: str) -> list[Branch]:
        """Where a run was put back, in order."""
        return self._find("adapter = ? AND source = adapter", adapter)

    def forks(self, adapter: str) -> list[Branch]:
        """The runs that began as this one was."""
        return self._find("source = ? AND adapter <> source", adapter)

    def seq_of(self, adapter: str, *, step: int) -> int:
        """The operation that made a step of the run; step 0 is how the run began.

        Raises:
            InvalidInput: It has not made so many steps, or that one is forgotten.
        """
        if step == 0:
            return 0
        where, parameters = self._applied_steps(adapter)
        num_past = self._num_past(where, parameters)
        if step <= num_past:
            raise InvalidInput(
                "step",
                f"what {adapter} was after step {step} is no longer kept; its first {num_past} steps are forgotten",
            )
        rows = self._database.read(
            f"SELECT seq FROM operation WHERE {where}{_IS_STEP} ORDER BY seq LIMIT 1 OFFSET ?",
            (*parameters, step - 1 - num_past),
        )
        if not rows:
            raise InvalidInput("step", f"{adapter} has made {self.num_steps(adapter)} steps, not {step}")
        return int(rows[0].seq)

    def seq_of_fork(self, adapter: str | None, *, source: str, step: int) -> int:
        """After which operation of ``source`` a fork by a step begins: a resend's where the first one did.

        By then the step may be forgotten, or undone and made anew. ``adapter`` is the run that may exist already.

        Raises:
            InvalidInput: As :meth:`seq_of` does, if it was not accepted before.
        """
        return self._seq_asked_for(source, step, "adapter = ? AND seq = 0", adapter)

    def seq_of_rewind(self, adapter: str, *, step: int, request_key: str | None) -> int:
        """The same of a rewind, which its key names."""
        return self._seq_asked_for(adapter, step, "adapter = source AND request_key = ?", request_key)

    def _seq_asked_for(self, source: str, step: int, where: str, parameter: str | None) -> int:
        rows = self._database.read(
            f"SELECT at FROM branch WHERE source = ? AND step = ? AND {where}", (source, step, parameter)
        )
        return int(rows[0].at) if rows else self.seq_of(source, step=step)

    def num_steps(self, adapter: str) -> int:
        """How many steps of the optimizer the run's present state has come from."""
        return self._num_steps(*self._applied_steps(adapter))

    def steps(self, adapter: str, *, limit: int) -> list[Step]:
        """The latest of these steps, in order."""
        where, parameters = self._applied_steps(adapter)
        rows = self._database.read(
            f"SELECT seq, finished_at FROM operation WHERE {where}{_IS_STEP} ORDER BY seq DESC LIMIT ?",
            (*parameters, limit),
        )
        if not rows:
            return []
        last = self._num_steps(f"{where} AND seq <= ?", (*parameters, rows[0].seq))
        return [
            Step(number=last - place, seq=row.seq, finished_at=row.finished_at)
            for place, row in reversed(list(enumerate(rows)))
        ]

    def _applied_steps(self, adapter: str) -> tuple[str, tuple[object, ...]]:
        """A condition on ``operation`` and ``past_steps``, and its parameters."""
        undone = self._undone(adapter)
        where = "lane = ?" + " AND NOT (seq > ? AND seq < ?)" * len(undone)
        return where, (adapter, *(seq for cut in undone for seq in cut))

    def _num_steps(self, where: str, parameters: tuple[object, ...]) -> int:
        (row,) = self._database.read(
            f"SELECT (SELECT COUNT(*) FROM operation WHERE {where}{_IS_STEP})"
            f" + (SELECT COALESCE(SUM(num_steps), 0) FROM past_steps WHERE {where}) AS number",
            (*parameters, *parameters),
        )
        return int(row.number)

    def _num_past(self, where: str, parameters: tuple[object, ...]) -> int:
        """How many of them are forgotten: the first ones."""
        (row,) = self._database.read(
            f"SELECT COALESCE(SUM(num_steps), 0) AS number FROM past_steps WHERE {where}", parameters
        )
        return int(row.number)

    def _undone(self, adapter: str) -> list[tuple[int, int]]:
        """What rewinds have cut out of the run's history: operations strictly between two numbers."""
        done = self._database.read(
            "SELECT b.seq, b.at FROM branch b JOIN operation o ON o.lane = b.adapter AND o.seq = b.seq"
            " WHERE b.adapter = ? AND b.source = ? AND o.state = 'done' ORDER BY b.seq DESC",
            (adapter, adapter),
        )
        cuts: list[tuple[int, int]] = []
        for rewind in done:
            if not cuts or rewind.seq <= cuts[-1][0]:
                cuts.append((rewind.at, rewind.seq))
        return cuts

    def _find(self, where: str, adapter: str) -> list[Branch]:
        rows = self._database.read(
            f"SELECT adapter, seq, source, at, created_at FROM branch WHERE {where} ORDER BY created_at, seq",
            (adapter,),
        )
        return [_branch_of(row) for row in rows]


def fork_of(
    source: Adapter, adapter_id: str, session: str, *, now: float, dialect: Dialect | None = None
) -> NewAdapter:
    """A run about to begin as ``source`` was: of the same shape, on the same mesh, of the same tenant.

    It is trained through ``dialect``, if that is said, else through the source's.
    """
    config = source.config if dialect is None else source.config.model_copy(update={"dialect": dialect})
    return NewAdapter(
        id=adapter_id,
        tenant=source.tenant,
        session=session,
        mesh=source.mesh,
        config=config,
        optimizer=source.optimizer,
        user_metadata=source.user_metadata,
        created_at=now,
    )


def _submission(tenant: str, lane: str, seq: int, kind: OperationKind, source: str, at: int) -> Submission:
    body = json.dumps({"source": source, "at": at}).encode()
    return Submission(
        tenant=tenant, lane=lane, seq=seq, kind=kind, digest=sha256(body).hexdigest(), payload=Payload(inline=body)
    )


def _check_reachable(transaction: Transaction, lane: LockedLane, at: int) -> None:
    floor_seq, state = _look_up(transaction, lane.id, at)
    if at < floor_seq:
        raise InvalidInput(
            "operation", f"what {lane.id} was before operation {floor_seq} is no longer kept; go back to {floor_seq}"
        )
    if at >= lane.head_seq or state is None:
        raise InvalidInput(
            "operation", f"{lane.id} has not executed operation {at} yet; its next one is {lane.head_seq}"
        )
    if not state:
        row = transaction.execute(
            f"SELECT MAX(seq) AS last FROM operation WHERE lane = ? AND seq < ? AND {_IS_STATE}", (lane.id, at)
        ).fetchone()
        raise InvalidInput(
            "operation",
            f"{at} of {lane.id} is neither a step that was applied nor a load, a fork, a rewind or the creation;"
            f" the last such operation before it is {row.last if row else None}",
        )


def _look_up(transaction: Transaction, adapter: str, at: int) -> tuple[int, bool | None]:
    """The floor, and whether ``at`` is a state to go back to; ``None`` where there is no such operation."""
    row = transaction.execute(
        f"SELECT l.floor_seq, (SELECT CASE WHEN {_IS_STATE} THEN 1 ELSE 0 END FROM operation"
        " WHERE lane = l.id AND seq = ?) AS is_state FROM lane l WHERE l.id = ?",
        (at, adapter),
    ).fetchone()
    assert row is not None, "the lane is locked"
    return int(row.floor_seq), None if row.is_state is None else bool(row.is_state)


def _insert_branch(transaction: Transaction, branch: Branch, *, step: int | None, request_key: str | None) -> None:
    transaction.execute(
        "INSERT INTO branch (adapter, seq, source, at, step, request_key, created_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (branch.adapter, branch.seq, branch.source, branch.at, step, request_key, branch.created_at),
    )


def _branch_of_key(transaction: Transaction, source: str, request_key: str | None) -> Branch | None:
    if request_key is None:
        return None
    row = transaction.execute(
        "SELECT adapter, seq, source, at, created_at FROM branch WHERE source = ? AND request_key = ?",
        (source, request_key),
    ).fetchone()
    return None if row is None else _branch_of(row)


def _branch_of(row: Row) -> Branch:
    return Branch(adapter=row.adapter, seq=row.seq, source=row.source, at=row.at, created_at=row.created_at)
