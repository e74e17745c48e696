"""What is inserted into the journal beside operations: lanes and their owners, checkpoints, sampling sessions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from twinkle.core.adapter import AdapterConfig, Checkpoint, Dialect
from twinkle.core.errors import Conflict, LimitReached
from twinkle.core.operation import OperationKind, Payload
from twinkle.storage.adapters.snapshots import Snapshot
from twinkle.storage.checkpoints.contents import publish_checkpoint
from twinkle.storage.database import Transaction
from twinkle.storage.journal.forgotten import refuse_gone
from twinkle.storage.processors.progress import ProcessorProgress
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights


class NewLane(Protocol):
    """Something with a lane that does not exist yet."""

    @property
    def id(self) -> str:
        """The lane's id."""
        ...

    @property
    def tenant(self) -> str:
        """Whose it is to be."""
        ...

    def insert(self, transaction: Transaction) -> None:
        """Insert it unless it exists."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdapterLimit:
    """How many adapters of live sessions the tenant may have; those are sessions heard of since ``live_since``."""

    max_adapters: int
    live_since: float

    def check(self, transaction: Transaction, tenant: str) -> None:
        """Count them, the new one among them.

        Raises:
            LimitReached: They are too many.
        """
        # Two that are created at once wait for each other here.
        transaction.execute("UPDATE tenant SET weight = weight WHERE id = ?", (tenant,))
        row = transaction.execute(
            "SELECT COUNT(*) AS num_adapters FROM adapter a JOIN session s ON s.id = a.session"
            " JOIN lane l ON l.id = a.id"
            " WHERE a.tenant = ? AND l.ordered AND l.unload_seq IS NULL"
            " AND s.finished_at IS NULL AND s.heartbeat_at >= ?",
            (tenant, self.live_since),
        ).fetchone()
        assert row is not None
        if row.num_adapters > self.max_adapters:
            raise LimitReached(
                f"you have {row.num_adapters - 1} adapters in live sessions, and {self.max_adapters} may be; end a"
                " session (service_client.close('success')) or let one lapse, or ask the operator for more",
            )


@dataclass(frozen=True, kw_only=True)
class NewAdapter:
    """A training run about to be created. Of a tenant's adapters the one of the highest priority goes first."""

    id: str
    tenant: str
    session: str
    mesh: str
    config: AdapterConfig
    optimizer: dict[str, object]
    user_metadata: dict[str, str] | None
    created_at: float
    priority: int = 0
    limit: AdapterLimit | None = None

    def insert(self, transaction: Transaction) -> None:
        """Insert the lane and the adapter unless they exist.

        Raises:
            LimitReached: The tenant has as many adapters as it may have.
            Conflict: It trains the whole model, and the mesh is taken by another run.
        """
        is_new = insert_lane(
            transaction,
            self.id,
            self.tenant,
            self.mesh,
            ordered=True,
            priority=self.priority,
            arrival_numbered=self.config.dialect is Dialect.TWINKLE,
            requested_at=self.created_at,
        )
        transaction.execute(
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, user_metadata, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (
                self.id,
                self.tenant,
                self.session,
                self.mesh,
                self.config.model_dump_json(),
                json.dumps(self.optimizer),
                None if self.user_metadata is None else json.dumps(self.user_metadata),
                self.created_at,
            ),
        )
        if is_new and self.config.is_whole_model:
            self._check_alone(transaction)
        if is_new and self.limit is not None:
            self.limit.check(transaction, self.tenant)

    def _check_alone(self, transaction: Transaction) -> None:
        """A mesh for whole models has one run at a time: until it was unloaded or parked, or its session has ended."""
        # Two that are created at once wait for each other here.
        transaction.execute("UPDATE mesh SET name = name WHERE name = ?", (self.mesh,))
        taken = transaction.execute(
            "SELECT a.id FROM adapter a JOIN session s ON s.id = a.session JOIN lane l ON l.id = a.id"
            " WHERE a.mesh = ? AND a.id <> ? AND a.parked_at IS NULL AND s.finished_at IS NULL AND l.unload_seq IS NULL"
            " LIMIT 1",
            (self.mesh, self.id),
        ).fetchone()
        if taken is not None:
            raise Conflict(
                f"mesh {self.mesh} trains all weights of one run at a time, and is taken; come back when that run was"
                " unloaded or its session has ended, or train an adapter on another mesh (send a LoRA config)"
            )


@dataclass(frozen=True, kw_only=True)
class NewSamplingSession:
    """A sampling session about to be created: on the checkpoint at a path, on ``weights``, or on the base model.

    ``content`` is what that path means now, and all that the session will ever read; a stranger's session reads it as
    long as its ``generation`` is this.

    Its priority is that of the lane ``like`` which it comes from, else ``priority``.
    """

    id: str
    tenant: str
    session: str
    mesh: str
    base_model: str
    model_path: str | None = None
    checkpoint: str | None = None
    content: str | None = None
    generation: int = 0
    weights: NewEphemeralWeights | None = None
    priority: int = 0
    like: str | None = None

    def insert(self, transaction: Transaction) -> None:
        """Insert the lane and the sampling session unless they exist."""
        priority = self.priority
        if self.like is not None:
            row = transaction.execute("SELECT nice FROM lane WHERE id = ?", (self.like,)).fetchone()
            priority = priority if row is None else -row.nice
        insert_lane(transaction, self.id, self.tenant, self.mesh, ordered=False, priority=priority)
        inserted = transaction.execute(
            "INSERT INTO sampling_session (id, tenant, session, base_model, model_path, checkpoint, content,"
            " generation) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (
                self.id,
                self.tenant,
                self.session,
                self.base_model,
                self.model_path,
                self.checkpoint,
                self.content,
                None if self.content is None else self.generation,
            ),
        )
        # What a session samples from never changes, whoever else comes with its number.
        if self.weights is not None and inserted.rowcount == 1:
            self.weights.insert(transaction, self.id, tenant=self.tenant, session=self.session)


def insert_lane(
    transaction: Transaction,
    lane: str,
    tenant: str,
    mesh: str,
    *,
    ordered: bool,
    priority: int = 0,
    arrival_numbered: bool = False,
    requested_at: float | None = None,
) -> bool:
    """Insert a lane, with its tenant's share of the mesh, unless it exists; whether it is new.

    Args:
        transaction: In which it happens.
        lane: Its id.
        tenant: Whose.
        mesh: Where.
        ordered: Whether its operations are done one after the other.
        priority: Among its tenant's lanes.
        arrival_numbered: Whether the journal numbers its operations.
        requested_at: When it was made, of a training run or a copy.

    Raises:
        Expired: There was one of this id, which is forgotten.
    """
    transaction.execute(
        "INSERT INTO share (mesh, tenant) VALUES (?, ?) ON CONFLICT (mesh, tenant) DO NOTHING", (mesh, tenant)
    )
    inserted = transaction.execute(
        "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime, nice, arrival_numbered,"
        " requested_at) VALUES (?, ?, ?, ?, 0, -1, 0, 0, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        (lane, tenant, mesh, ordered, -priority, arrival_numbered, requested_at),
    )
    if inserted.rowcount == 1:
        refuse_gone(transaction, lane)
    return inserted.rowcount == 1


@dataclass(frozen=True, kw_only=True)
class Records:
    """What an outcome brings into being; committed with it or not at all."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    sampling_sessions: list[NewSamplingSession] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    progress: list[ProcessorProgress] = field(default_factory=list)

    def insert(self, transaction: Transaction, now: float) -> None:
        """Insert everything. A checkpoint of the same name replaces its predecessor (the worker has decided that)."""
        for checkpoint in self.checkpoints:
            publish_checkpoint(transaction, checkpoint, now=now)
        for session in self.sampling_sessions:
            session.insert(transaction)
        for snapshot in self.snapshots:
            snapshot.insert(transaction)
        for progress in self.progress:
            progress.insert(transaction, now)


@dataclass(frozen=True, kw_only=True)
class PastOperation:
    """A finished operation, as a replay sees it."""

    request_id: str
    seq: int
    kind: OperationKind
    payload: Payload
    succeeded: bool
    error_code: str | None
    num_tokens: int
