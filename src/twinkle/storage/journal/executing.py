"""What a worker does to the journal: what it claims is put into its hands, what it commits ends and is charged for.

``journal.py`` opens the transactions. Whatever is done here stands behind the fence of the worker's lease.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twinkle.core.errors import LeaseLost
from twinkle.core.lease import Lease
from twinkle.core.operation import Claim, OperationKind, OperationState, Outcome, Payload
from twinkle.storage.database import Asked, Cursor, Database, Row, Transaction, placeholders, raised
from twinkle.storage.journal.lanes import LockedLane
from twinkle.storage.journal.turns import READY_LANE, WAITING_SAMPLE, Head

MOST_AHEAD = 8
"""How far a worker may claim ahead in a lane, whatever it is told."""


@dataclass(kw_only=True)
class Committed:
    """What a commit made of the outcomes it was given.

    ``ended_before`` had an outcome already, which stands: they were cancelled or overdue, or an earlier commit did
    arrive though its answer did not. ``not_held`` have none, but are not in the caller's hands any more.
    """

    recorded: list[Outcome] = field(default_factory=list)
    ended_before: list[Outcome] = field(default_factory=list)
    not_held: list[Outcome] = field(default_factory=list)

    def add(self, others: Committed) -> None:
        """Take in what another commit made of others."""
        self.recorded += others.recorded
        self.ended_before += others.ended_before
        self.not_held += others.not_held

    def note(self, outcome: Outcome, state: OperationState | None) -> None:
        """Put an outcome where it belongs; ``state`` is the one that kept it out."""
        if state is None:
            self.recorded.append(outcome)
        else:
            (self.ended_before if state.is_final else self.not_held).append(outcome)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """What there may be to claim on a mesh: heads of adapters, and samples, those under way among them."""

    heads: bool
    samples: bool


def read_waiting(database: Database, lease: Lease) -> Waiting:
    """What may be claimed, asked without a writer's transaction: others wait for those.

    Raises:
        LeaseLost: Another epoch holds the mesh.
    """
    rows = database.read(
        f"SELECT epoch, owner, EXISTS ({READY_LANE}) AS heads, EXISTS ({WAITING_SAMPLE}) AS samples"
        " FROM mesh WHERE name = ?",
        (lease.mesh, lease.mesh, lease.mesh),
    )
    row = _held(rows[0] if rows else None, lease)
    return Waiting(heads=bool(row.heads), samples=bool(row.samples))


def check_lease(transaction: Transaction, lease: Lease) -> float:
    """The mesh's virtual time, if the lease still holds."""
    return held_since(ask_for_lease(transaction, lease), lease)


def ask_for_lease(transaction: Transaction, lease: Lease) -> Asked:
    """The same without waiting; :func:`held_since` reads the answer, before anything that was sent may count."""
    return transaction.ask("SELECT epoch, owner, vtime FROM mesh WHERE name = ? FOR SHARE", (lease.mesh,))


def held_since(asked: Asked, lease: Lease) -> float:
    """The mesh's virtual time.

    Raises:
        LeaseLost: Another epoch holds the mesh.
    """
    rows = asked()
    return float(_held(rows[0] if rows else None, lease).vtime)


def _held(mesh: Row | None, lease: Lease) -> Row:
    if mesh is None or mesh.epoch != lease.epoch or mesh.owner != lease.owner:
        held = "nobody" if mesh is None or mesh.owner is None else f"epoch {mesh.epoch}"
        raise LeaseLost(f"mesh {lease.mesh}: epoch {lease.epoch} has ended, {held} holds it now", mesh=lease.mesh)
    return mesh


def start_operations(
    transaction: Transaction, lease: Lease, request_ids: list[str], *, now: float
) -> Callable[[], list[Claim]]:
    """Put the chosen operations into the lease holder's hands: what is returned reads them, when all is committed."""
    if not request_ids:
        return list
    asked = transaction.ask(
        "UPDATE operation SET suspicions = suspicions"
        " + CASE WHEN state = 'running' AND claim_epoch <> ? THEN 1 ELSE 0 END,"
        " state = 'running', attempts = attempts + 1, claim_epoch = ?, started_at = ?"
        f" WHERE request_id IN ({placeholders(request_ids)}) AND state IN ('queued', 'running') AND mesh = ?"
        " RETURNING request_id, tenant, lane, seq, kind, payload, payload_blob, payload_bytes, attempts,"
        " suspicions, num_tokens, accepted_at, rejection, num_sequences,"
        " (SELECT failed_window_seq FROM lane WHERE lane.id = operation.lane) AS failed_window_seq",
        (lease.epoch, lease.epoch, now, *request_ids, lease.mesh),
    )

    def started() -> list[Claim]:
        claims = {row.request_id: _claim_of(row) for row in asked()}
        return [claims[request_id] for request_id in request_ids if request_id in claims]

    return started


def free_followers(transaction: Transaction, lease: Lease, heads: Iterable[Head]) -> None:
    """Put back what stood behind operations that lost their worker, had it been claimed ahead: it was never begun.

    Or it was begun on a state that nobody knows any more. No attempt is counted and nothing is suspected.
    """
    for head in heads:
        transaction.execute(
            "UPDATE operation SET state = 'queued', claim_epoch = 0, attempts = attempts - 1"
            " WHERE lane = ? AND seq > ? AND seq <= ? AND state = 'running' AND claim_epoch <> ? AND mesh = ?",
            (head.lane, head.seq, head.seq + MOST_AHEAD, lease.epoch, lease.mesh),
        )


def state_of(transaction: Transaction, request_id: str) -> OperationState:
    """In which state an operation is; one that was forgotten had ended."""
    row = transaction.execute("SELECT state FROM operation WHERE request_id = ?", (request_id,)).fetchone()
    return OperationState.FAILED if row is None else OperationState(row.state)


def record_outcomes(transaction: Transaction, lease: Lease, outcomes: Sequence[Outcome], now: float) -> Committed:
    """Record them, each lane's in its order; what follows in its lane on one that is not taken is not recorded either.

    Where answers are a journey away, those that do not follow on each other travel together.
    """
    came: dict[str, OperationState | None] = {}
    untaken: set[str] = set()
    for wave in _waves(outcomes):
        fit = [outcome for outcome in wave if not (outcome.kind.is_ordered and outcome.lane in untaken)]
        sent = [(outcome, _record(transaction, lease, outcome, now)) for outcome in fit]
        for outcome, answer in sent:
            came[outcome.request_id] = None
            if answer.rowcount != 1:
                came[outcome.request_id] = state_of(transaction, outcome.request_id)
                untaken.add(outcome.lane)
    committed = Committed()
    for outcome in outcomes:
        if outcome.request_id not in came:
            came[outcome.request_id] = state_of(transaction, outcome.request_id)
        committed.note(outcome, came[outcome.request_id])
    return committed


def _waves(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """The first of each lane, then the second of each; what is in no order follows on nothing."""
    waves: list[list[Outcome]] = []
    num_before: Counter[str] = Counter()
    for outcome in outcomes:
        place = num_before[outcome.lane] if outcome.kind.is_ordered else 0
        num_before[outcome.lane] += 1
        while len(waves) <= place:
            waves.append([])
        waves[place].append(outcome)
    return waves


def _record(transaction: Transaction, lease: Lease, outcome: Outcome, now: float) -> Cursor:
    failure = outcome.failure
    result = outcome.result
    return transaction.execute(
        "UPDATE operation SET state = ?, result = ?, result_blob = ?, result_bytes = ?, error = ?, error_category = ?,"
        " error_code = ?, device_s = ?, num_tokens = ?, finished_at = ?"
        " WHERE request_id = ? AND state = 'running' AND claim_epoch = ? AND mesh = ?",
        (
            OperationState.FAILED.value if failure else OperationState.DONE.value,
            result.inline if result else None,
            result.blob if result else None,
            result.size_bytes if result else None,
            failure.message if failure else None,
            failure.category.value if failure else None,
            failure.code if failure else None,
            outcome.device_s,
            outcome.num_tokens,
            now,
            outcome.request_id,
            lease.epoch,
            lease.mesh,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Served:
    """What a tenant is charged for at a commit. ``lane_vtime`` is the lowest one among the lanes that were served."""

    num_tokens: int
    lane_vtime: float


def charge(
    transaction: Transaction,
    mesh: str,
    outcomes: Iterable[Outcome],
    lanes: Mapping[str, LockedLane],
    *,
    mesh_vtime: float,
    now: float,
    tokens_per_minute: int,
) -> dict[str, float]:
    """Move the tenants' virtual times on, and what their rates leave them; where each one's idle lanes begin.

    What an operation is charged was decided by the scheduler, whose tags these are. The database adds it up, because it
    alone can without waiting: between a read and a write of ours an administrator sets a weight, and the worker of
    another mesh charges the same tenant's rate. To lock those rows first would make the meshes wait for each other.

    Args:
        transaction: The commit's, which holds the lanes' locks. Tenants come in the order of their ids.
        mesh: On which mesh.
        outcomes: Those that were recorded.
        lanes: Theirs.
        mesh_vtime: The mesh's virtual time.
        now: Unix seconds.
        tokens_per_minute: The rate of tenants that have none of their own; 0 is no limit.
    """
    served_of = sorted(_served_of(outcomes, lanes).items())
    asked = [
        transaction.ask(
            f"UPDATE share SET vtime = {raised('vtime')} + ? / (SELECT weight FROM tenant WHERE id = share.tenant),"
            f" lane_vtime = {raised('lane_vtime')} WHERE mesh = ? AND tenant = ?"
            " RETURNING lane_vtime, (SELECT tokens_per_minute FROM tenant WHERE id = share.tenant) AS rate",
            (mesh_vtime, mesh_vtime, float(served.num_tokens), served.lane_vtime, served.lane_vtime, mesh, tenant),
        )
        for tenant, served in served_of
    ]
    floors = {}
    for (tenant, served), answer in zip(served_of, asked, strict=True):
        # A lane comes with its tenant's share.
        (row,) = answer()
        floors[tenant] = row.lane_vtime
        rate = tokens_per_minute if row.rate is None else row.rate
        if rate:
            transaction.execute(
                f"UPDATE tenant SET paid_until = {raised('paid_until')} + ? WHERE id = ?",
                (now, now, served.num_tokens * 60.0 / rate, tenant),
            )
    return floors


def _served_of(outcomes: Iterable[Outcome], lanes: Mapping[str, LockedLane]) -> dict[str, _Served]:
    """The sum of each tenant's charges."""
    served: dict[str, _Served] = {}
    for outcome in outcomes:
        lane = lanes[outcome.lane]
        before = served.get(lane.tenant, _Served(num_tokens=0, lane_vtime=lane.vtime))
        served[lane.tenant] = _Served(
            num_tokens=before.num_tokens + outcome.charge, lane_vtime=min(before.lane_vtime, lane.vtime)
        )
    return served


def _claim_of(row: Row) -> Claim:
    return Claim(
        request_id=row.request_id,
        tenant=row.tenant,
        lane=row.lane,
        seq=row.seq,
        kind=OperationKind(row.kind),
        payload=Payload(inline=row.payload, blob=row.payload_blob, blob_bytes=row.payload_bytes),
        attempt=row.attempts,
        suspicions=row.suspicions,
        num_tokens=row.num_tokens,
        accepted_at=row.accepted_at,
        rejection=row.rejection,
        failed_window_seq=row.failed_window_seq,
        num_sequences=row.num_sequences,
    )
