"""A journal with tenants, lanes and a lease, and short words for what tests do with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256

from sqlmodel import Session

from harness.clock import HandClock
from twinkle.core.adapter import AdapterConfig, Checkpoint
from twinkle.core.errors import UserError
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.operation import (
    Accepted,
    Claim,
    Failure,
    FailureCategory,
    FutureStatus,
    OperationKind,
    Outcome,
    Payload,
    Submission,
)
from twinkle.scheduler.fairness import with_virtual_time
from twinkle.scheduler.fusion import choose_samples
from twinkle.storage.journal.records import NewAdapter, NewSamplingSession
from twinkle.storage.journal.turns import Head
from twinkle.storage.sql_engine import sql_engine
from twinkle.storage.stores import Stores
from twinkle.storage.tables import SessionRow, TenantRow

MESH = "mesh0"
CONFIG = AdapterConfig(base_model="base", rank=4, seed=1)


def identity(name: str) -> ProcessIdentity:
    """A process on another machine: whether it lives nobody here can tell."""
    return ProcessIdentity(host=f"host-{name}", pid_namespace="elsewhere", pid=1, start_ticks=1)


def digest(body: bytes) -> str:
    return sha256(body).hexdigest()


def submission(
    lane: str,
    seq: int,
    kind: OperationKind = OperationKind.FORWARD_BACKWARD,
    *,
    body: bytes | None = None,
    tenant: str = "t0",
    num_tokens: int = 1,
    rejection: str | None = None,
) -> Submission:
    body = f"{lane} {seq} {kind}".encode() if body is None else body
    return Submission(
        tenant=tenant,
        lane=lane,
        seq=seq,
        kind=kind,
        digest=digest(body),
        payload=Payload(inline=body),
        num_tokens=num_tokens,
        rejection=rejection,
    )


def new_adapter(adapter: str, *, tenant: str = "t0", mesh: str = MESH, config: AdapterConfig = CONFIG) -> NewAdapter:
    return NewAdapter(
        id=adapter,
        tenant=tenant,
        session=f"session-{tenant}",
        mesh=mesh,
        config=config,
        optimizer={"type": "adamw"},
        user_metadata=None,
        created_at=0.0,
    )


def new_sampler(session_id: str, *, tenant: str = "t0", checkpoint: Checkpoint | None = None) -> NewSamplingSession:
    """As the API opens it: on what a path means at that moment."""
    return NewSamplingSession(
        id=session_id,
        tenant=tenant,
        session=f"session-{tenant}",
        mesh=MESH,
        base_model=CONFIG.base_model,
        checkpoint=None if checkpoint is None else checkpoint.path,
        content=None if checkpoint is None else checkpoint.content,
        generation=0 if checkpoint is None else checkpoint.generation,
    )


def done(claim: Claim, result: bytes = b"ok", num_tokens: int = 1) -> Outcome:
    return Outcome(
        request_id=claim.request_id,
        lane=claim.lane,
        seq=claim.seq,
        kind=claim.kind,
        result=Payload(inline=result),
        num_tokens=num_tokens,
        charge=max(num_tokens, 1),
    )


def failed(claim: Claim, code: str = "invalid_input") -> Outcome:
    failure = Failure(message=f"{claim.seq} failed", category=FailureCategory.USER, code=code)
    return Outcome(request_id=claim.request_id, lane=claim.lane, seq=claim.seq, kind=claim.kind, failure=failure)


def everything(heads: list[Head]) -> list[Head]:
    return heads


@dataclass(frozen=True)
class LaneState:
    """The bookkeeping of one lane, as it stands in its row."""

    head_seq: int
    head_kind: str | None
    max_seq: int
    gap_since: float | None
    failed_window_seq: int | None


class Bench:
    """One database with two tenants, ``t0`` and ``t1``, each with a session."""

    def __init__(self, database_url: str, clock: HandClock) -> None:
        self.url = database_url
        self.clock = clock
        self.stores = stores = Stores.at(database_url, clock)
        self.database, self.engine = stores.database, sql_engine(database_url)
        self.journal, self.branches, self.meshes = stores.journal, stores.branches, stores.meshes
        self.adapters, self.snapshots, self.upkeep = stores.adapters, stores.snapshots, stores.upkeep
        self.named_adapters = stores.named_adapters
        self.checkpoints, self.sampling_sessions = stores.checkpoints, stores.sampling_sessions
        with Session(self.engine) as session:
            for tenant in ("t0", "t1"):
                if session.get(TenantRow, tenant) is None:
                    self._add_tenant(session, tenant)
            session.commit()

    def add_tenant(self, tenant: str) -> None:
        """One more, with a session."""
        with Session(self.engine) as session:
            self._add_tenant(session, tenant)
            session.commit()

    def _add_tenant(self, session: Session, tenant: str) -> None:
        session.add(TenantRow(id=tenant, name=tenant, created_at=0.0))
        session.flush()
        session.add(SessionRow(id=f"session-{tenant}", tenant=tenant, tags="[]", created_at=0.0, heartbeat_at=0.0))

    def close(self) -> None:
        self.stores.close()
        self.engine.dispose()

    def lease(self, owner: str = "a", *, mesh: str = MESH, lease_s: float = 15.0) -> Lease:
        """The mesh, taken by force: whoever held it has run out of time."""
        self.clock.move(10 * lease_s)
        lease = self.meshes.acquire(mesh, identity(owner), lease_s=lease_s)
        assert lease is not None
        return lease

    def adapter(self, adapter: str, *, tenant: str = "t0") -> Submission:
        """An adapter whose creation waits as number 0."""
        first = submission(
            adapter, 0, OperationKind.CREATE_MODEL, body=CONFIG.model_dump_json().encode(), tenant=tenant
        )
        self.journal.open_lane(new_adapter(adapter, tenant=tenant), first)
        return first

    def created(self, lease: Lease, *adapters: str, tenant: str = "t0") -> None:
        """Adapters whose creation is done."""
        for adapter in adapters:
            self.adapter(adapter, tenant=tenant)
        self.journal.commit(lease, [done(claim) for claim in self.claim(lease)])

    def append(self, *submissions: Submission) -> list[Accepted | UserError]:
        return self.journal.append(list(submissions))

    def claim(self, lease: Lease, limit: int = 256) -> list[Claim]:
        return self.journal.claim(lease, with_virtual_time(everything), limit)

    def claim_samples(self, lease: Lease, limit: int, *, under_way: Collection[str] = ()) -> list[Claim]:
        """As a worker claims them that has room for so many."""
        is_idle = not under_way
        return self.journal.claim_samples(
            lease,
            with_virtual_time(lambda heads: choose_samples(heads, room=limit, is_idle=is_idle)),
            limit,
            under_way=under_way,
        )

    def run(self, lease: Lease) -> list[tuple[str, int]]:
        """Claim and commit until nothing is left; what was done, in order."""
        order: list[tuple[str, int]] = []
        while claims := self.claim(lease):
            self.journal.commit(lease, [done(claim) for claim in claims])
            order += [(claim.lane, claim.seq) for claim in claims]
        return order

    def status(self, lane: str, seq: int) -> FutureStatus:
        request_id = request_id_of(lane, seq)
        return self.journal.statuses([request_id])[request_id].status

    def lane(self, lane: str) -> LaneState:
        rows = self.database.read(
            "SELECT head_seq, head_kind, max_seq, gap_since, failed_window_seq FROM lane WHERE id = ?", (lane,)
        )
        return LaneState(*rows[0])

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[object, ...]]:
        return self.database.read(sql, parameters)
