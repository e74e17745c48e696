"""Whose turn it is: the shares tenants have had of a mesh, and the operations that may run.

What is read here are tags as they are stored; ``scheduler/fairness.py`` makes an order of them. A flow that was idle is
moved on when it is read and when it is charged, never when an operation arrives: an arrival touches its own lane only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState
from twinkle.storage.database import Asked, Row, Transaction

RATE_BURST_S = 10.0
"""A tenant with a rate may use this many seconds' worth of it at once."""

_LEAST_HEADS_EACH = 4

# The next tenant with work is looked up in the index, so the cost grows with them and not with lanes or operations.
READY_TENANTS = (
    "WITH RECURSIVE ready(tenant) AS ("
    " SELECT MIN(tenant) FROM lane WHERE mesh = ? AND head_kind IS NOT NULL"
    " UNION ALL SELECT (SELECT MIN(l.tenant) FROM lane l WHERE l.mesh = ? AND l.head_kind IS NOT NULL"
    " AND l.tenant > ready.tenant) FROM ready WHERE ready.tenant IS NOT NULL)"
    " SELECT s.tenant, s.vtime, t.weight, t.max_running, s.lane_vtime FROM ready"
    " JOIN share s ON s.mesh = ? AND s.tenant = ready.tenant JOIN tenant t ON t.id = s.tenant"
    " WHERE t.paid_until <= ? ORDER BY s.vtime, s.tenant LIMIT ?"
)
READY_LANE = "SELECT 1 FROM lane WHERE mesh = ? AND head_kind IS NOT NULL"
WAITING_SAMPLE = "SELECT 1 FROM operation WHERE mesh = ? AND kind = 'sample' AND state IN ('queued', 'running')"
HEADS_OF_TENANT = (
    "SELECT l.tenant, l.id, l.head_seq, l.head_kind, o.suspicions, o.num_tokens, l.nice, l.vtime, l.max_seq,"
    " o.state, o.claim_epoch"
    " FROM lane l JOIN operation o ON o.lane = l.id AND o.seq = l.head_seq"
    " WHERE l.tenant = ? AND l.mesh = ? AND l.head_kind IS NOT NULL AND l.not_before <= ? AND l.moving_to IS NULL"
    " ORDER BY l.nice, l.vtime, l.id LIMIT ?"
)
LANES_WITH_SAMPLES = (
    "WITH RECURSIVE waiting(lane) AS ("
    " SELECT MIN(lane) FROM operation WHERE mesh = ? AND kind = 'sample' AND state IN ('queued', 'running')"
    " UNION ALL SELECT (SELECT MIN(o.lane) FROM operation o WHERE o.mesh = ? AND o.kind = 'sample'"
    " AND o.state IN ('queued', 'running') AND o.lane > waiting.lane) FROM waiting WHERE waiting.lane IS NOT NULL)"
    " SELECT s.tenant, s.vtime, t.weight, t.max_running, s.lane_vtime, l.id, l.nice, l.vtime AS own_vtime,"
    " ROW_NUMBER() OVER (PARTITION BY s.tenant ORDER BY l.nice, l.vtime, l.id) AS place FROM waiting"
    " JOIN lane l ON l.id = waiting.lane JOIN share s ON s.mesh = l.mesh AND s.tenant = l.tenant"
    " JOIN tenant t ON t.id = s.tenant WHERE t.paid_until <= ? AND l.moving_to IS NULL"
    " ORDER BY place, s.vtime, s.tenant LIMIT ?"
)
FOLLOWER = (
    "SELECT o.tenant, l.id, o.seq, o.kind, o.suspicions, o.num_tokens, l.nice, l.vtime, l.max_seq"
    " FROM operation o JOIN lane l ON l.id = o.lane"
    " WHERE o.request_id = ? AND o.mesh = ? AND o.state = 'queued' AND o.suspicions = 0 AND o.rejection IS NULL"
    " AND o.kind IN ('forward', 'forward_backward', 'optim_step') AND o.not_before <= ?"
    " AND l.mesh = o.mesh AND l.head_kind IS NOT NULL AND l.moving_to IS NULL AND l.failed_window_seq IS NULL"
)
"""What stands behind an operation under way, if it may be begun before that one's outcome is committed.

Only where nothing that the outcome could change decides what becomes of it: no failure in its window, no rewind."""
SAMPLES_OF_LANE = (
    "SELECT lane, seq, suspicions, num_tokens, request_id, not_before, accepted_at, num_sequences, state, claim_epoch"
    " FROM operation"
    " WHERE lane = ? AND mesh = ? AND kind = 'sample' AND state IN ('queued', 'running')"
    " ORDER BY accepted_at, seq LIMIT ?"
)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Where a tenant stands on a mesh.

    ``vtime`` is its finish tag: tokens served so far, divided by its weight; ``mesh_vtime`` is the mesh's virtual time
    and ``lane_vtime`` that of the tenant's own lanes. Samples that run are counted beside them, since they are charged
    when they end. ``num_running`` counts sequences: a sample has one or several, any other operation is one.
    ``max_running`` is 0 where nothing limits how many run at once.
    """

    tenant: str
    vtime: float
    mesh_vtime: float
    lane_vtime: float
    weight: float
    max_running: int
    num_running: int = 0
    num_running_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Head:
    """An operation that may run, as the scheduler sees it before it decides what to claim.

    ``nice`` orders a tenant's adapters, the lowest first; ``vtime``, the tokens its lane was served so far, orders
    those that are equally nice. ``has_next`` tells whether something of the tenant waits behind this one and is not
    offered with it; ``suspicions`` counts the attempts at which its worker died or the device failed, so that it may be
    to blame; ``num_sequences`` is how many a sample draws at once, and ``num_running_tokens`` are those of its lane's
    samples that run.
    """

    turn: Turn
    lane: str
    seq: int
    kind: OperationKind
    suspicions: int
    num_tokens: int
    nice: int
    vtime: float
    has_next: bool
    num_sequences: int = 1
    num_running_tokens: int = 0
    was_lost: bool = False
    """Whether it runs in the hands of a holder that is gone."""

    @property
    def request_id(self) -> str:
        """The operation's future."""
        return request_id_of(self.lane, self.seq)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the scheduler takes of the heads that it was offered, and the mesh's virtual time when these are on offer.

    A lower virtual time than the mesh has moves nothing back.
    """

    heads: list[Head]
    vtime: float


Choose = Callable[[list[Head]], Choice]


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A lane whose operations are in the caller's hands: those behind them are offered before these have ended."""

    lane: str
    tenant: str
    last_seq: int
    """The number of the last one in hand."""
    room: int
    """How many of those behind it may be offered; 0 if none may."""
    num_tokens: int
    """Of the operations in hand, which count as served already."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a claim looks at: a mesh, its holder's epoch and its virtual time, the clock, and how many may run of a
    tenant without a limit of its own."""

    mesh: str
    epoch: int
    vtime: float
    now: float
    max_running: int


def move_virtual_time(transaction: Transaction, moment: Moment, vtime: float) -> None:
    """Let the mesh's virtual time go on with what is on offer; it never goes back."""
    if vtime > moment.vtime:
        transaction.execute("UPDATE mesh SET vtime = ? WHERE name = ?", (vtime, moment.mesh))


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What :func:`ask_who_is_ready` has asked: tenants with work, and what stands behind what is in hand."""

    tenants: Asked
    followers: Asked


def ask_who_is_ready(
    transaction: Transaction, mesh: str, *, now: float, limit: int, followed: Collection[Followed]
) -> Ready:
    """Ask what :func:`ready_heads` begins with, and wait for none of it."""
    wanted = [request_id_of(lane.lane, lane.last_seq + ahead) for lane in followed for ahead in range(1, lane.room + 1)]
    return Ready(
        tenants=transaction.ask(READY_TENANTS, (mesh, mesh, mesh, now + RATE_BURST_S, limit)),
        followers=transaction.ask_for_each(FOLLOWER, wanted, (mesh, now)) if wanted else list,
    )


def ready_heads(
    transaction: Transaction,
    moment: Moment,
    ready: Ready,
    *,
    limit: int,
    held: Collection[str] = (),
    followed: Collection[Followed] = (),
) -> list[Head]:
    """The heads of ready lanes, tenant by tenant in the order of their turns; of each tenant its first ones.

    Every tenant is offered some heads, however many adapters another one has. Tenants above their rate are left out.
    Lanes that are ``held`` are not offered: the caller works on their heads, or they wait for something of its own. Of
    those that are ``followed``, which are held too, what stands behind the operations in the caller's hands is offered
    after all heads.
    """
    mesh, now = moment.mesh, moment.now
    tenants = ready.tenants()
    if not tenants:
        return []
    each = min(limit, max(limit // len(tenants), _LEAST_HEADS_EACH))
    names = [tenant.tenant for tenant in tenants]
    rows: list[Row] = []
    running: Counter[str] = Counter()
    # Most tenants have several to offer, so the first ones usually fill the limit, and the others need not be asked.
    step = limit // each
    for start in range(0, len(names), step):
        some = names[start : start + step]
        for row in transaction.ask_for_each(HEADS_OF_TENANT, some, (mesh, now, each + len(held)))():
            if row.id not in held:
                rows.append(row)
            elif row.state == OperationState.RUNNING:
                running[row.tenant] += 1
        if len(rows) >= limit:
            break
    tokens: Counter[str] = Counter()
    for lane in followed:
        tokens[lane.tenant] += lane.num_tokens
    turns = {
        tenant.tenant: _turn(
            tenant, moment, num_running=running[tenant.tenant], num_running_tokens=tokens[tenant.tenant]
        )
        for tenant in tenants
    }
    order = {tenant: place for place, tenant in enumerate(names)}
    rows.sort(key=lambda row: (order[row.tenant], row.nice, row.vtime, row.id))
    cut = {tenant for tenant, count in Counter(row.tenant for row in rows).items() if count >= each}
    heads = [
        Head(
            turn=turns[row.tenant],
            lane=row.id,
            seq=row.head_seq,
            kind=OperationKind(row.head_kind),
            suspicions=_suspicions_of(row, moment),
            num_tokens=row.num_tokens,
            nice=row.nice,
            vtime=row.vtime,
            has_next=row.max_seq > row.head_seq or row.tenant in cut,
            was_lost=_was_lost(row, moment),
        )
        for row in rows[:limit]
    ]
    return heads + _followers(ready.followers(), followed, turns)


def _followers(rows: list[Row], followed: Collection[Followed], turns: dict[str, Turn]) -> list[Head]:
    """What stands behind operations in the caller's hands, number after number; nothing of a tenant above its rate."""
    open_lanes = {lane.lane: lane for lane in followed if lane.room > 0 and lane.tenant in turns}
    heads: list[Head] = []
    next_seq = {lane.lane: lane.last_seq + 1 for lane in open_lanes.values()}
    for row in sorted(rows, key=lambda row: (row.id, row.seq)):
        if row.seq != next_seq.get(row.id):
            continue
        next_seq[row.id] += 1
        heads.append(
            Head(
                turn=turns[row.tenant],
                lane=row.id,
                seq=row.seq,
                kind=OperationKind(row.kind),
                suspicions=row.suspicions,
                num_tokens=row.num_tokens,
                nice=row.nice,
                vtime=row.vtime,
                has_next=row.max_seq > row.seq,
                num_running_tokens=open_lanes[row.id].num_tokens,
            )
        )
    return heads


def waiting_samples(transaction: Transaction, moment: Moment, *, limit: int, under_way: Collection[str]) -> list[Head]:
    """Samples that nobody works on, the longest-waiting first.

    What is ``under_way`` counts as served already, for its tenant and for its lane.
    """
    mesh, now = moment.mesh, moment.now
    lanes = transaction.execute(LANES_WITH_SAMPLES, (mesh, mesh, now + RATE_BURST_S, limit + len(under_way)))
    lane_rows = {lane.id: lane for lane in lanes.fetchall()}
    if not lane_rows:
        return []
    each = len(under_way) + min(limit, max(2 * limit // len(lane_rows), _LEAST_HEADS_EACH))
    samples = transaction.ask_for_each(SAMPLES_OF_LANE, list(lane_rows), (mesh, each))()
    tokens_of_tenant: Counter[str] = Counter()
    running_of_tenant: Counter[str] = Counter()
    tokens_of_lane: Counter[str] = Counter()
    waiting = []
    for row in samples:
        tenant = lane_rows[row.lane].tenant
        if row.request_id in under_way:
            running_of_tenant[tenant] += row.num_sequences
            tokens_of_tenant[tenant] += row.num_tokens
            tokens_of_lane[row.lane] += row.num_tokens
        elif row.not_before <= now:
            waiting.append(row)
    turns = {
        lane.tenant: _turn(
            lane,
            moment,
            num_running=running_of_tenant[lane.tenant],
            num_running_tokens=tokens_of_tenant[lane.tenant],
        )
        for lane in lane_rows.values()
    }
    waiting.sort(key=lambda row: (row.accepted_at, row.seq))
    return [_sample_head(turns, lane_rows[row.lane], row, tokens_of_lane[row.lane], moment) for row in waiting]


def _turn(share: Row, moment: Moment, *, num_running: int, num_running_tokens: int) -> Turn:
    return Turn(
        tenant=share.tenant,
        vtime=share.vtime,
        mesh_vtime=moment.vtime,
        lane_vtime=share.lane_vtime,
        weight=share.weight,
        max_running=moment.max_running if share.max_running is None else share.max_running,
        num_running=num_running,
        num_running_tokens=num_running_tokens,
    )


def _was_lost(row: Row, moment: Moment) -> bool:
    """Whether an operation runs in the hands of a holder that is gone."""
    return bool(row.state == OperationState.RUNNING and row.claim_epoch != moment.epoch)


def _suspicions_of(row: Row, moment: Moment) -> int:
    """With one more for an operation whose holder is gone."""
    return int(row.suspicions) + int(_was_lost(row, moment))


def _sample_head(turns: dict[str, Turn], lane: Row, sample: Row, tokens_under_way: int, moment: Moment) -> Head:
    return Head(
        turn=turns[lane.tenant],
        lane=sample.lane,
        seq=sample.seq,
        kind=OperationKind.SAMPLE,
        suspicions=_suspicions_of(sample, moment),
        num_tokens=sample.num_tokens,
        nice=lane.nice,
        vtime=lane.own_vtime,
        has_next=False,
        num_sequences=sample.num_sequences,
        num_running_tokens=tokens_under_way,
    )
