"""Adapters: the training runs there are, and which of them lie parked, stay on their device, or were unloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from twinkle.core.adapter import AdapterConfig
from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, Payload, Submission
from twinkle.core.places import PlaceInList
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.lanes import accept_own, lock_lanes, unloaded_error

_COLUMNS = (
    "a.id, a.tenant, a.session, a.mesh, a.config, a.optimizer, a.user_metadata, a.created_at, a.parked_at, a.pinned_at"
)

NO_PROJECT = "default"
"""The project of sessions that were put into none: the SDK wants a name."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A training run."""

    id: str
    tenant: str
    session: str
    mesh: str
    config: AdapterConfig
    optimizer: dict[str, object]
    user_metadata: dict[str, str] | None
    created_at: float
    parked_at: float | None
    pinned_at: float | None


class Adapters:
    """Training runs: what there is, and the ways in which one leaves its device."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, adapter_id: str, *, tenant: str | None = None) -> Adapter:
        """One training run; ``tenant=None`` is for workers, who serve all.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        rows = self._database.read(f"SELECT {_COLUMNS} FROM adapter a WHERE a.id = ?", (adapter_id,))
        if not rows or (tenant is not None and rows[0].tenant != tenant):
            raise NotFound(f"no training run {adapter_id!r}")
        return _adapter_of(rows[0])

    def page(
        self, tenant: str, *, limit: int, offset: int, session_id: str | None = None, project_id: str | None = None
    ) -> tuple[list[Adapter], int]:
        """A page of the tenant's training runs, the one with the latest request first, and how many there are.

        Of all of them a page walks an index: what is passed over is not looked at otherwise.
        """
        of, only = "adapter a", ""
        asked: tuple[object, ...] = (tenant,)
        if session_id is not None:
            only, asked = f"{only} AND a.session = ?", (*asked, session_id)
        if project_id is not None:
            of = f"{of} JOIN session s ON s.id = a.session"
            only, asked = f"{only} AND COALESCE(s.project_id, ?) = ?", (*asked, NO_PROJECT, project_id)
        (counted,) = self._database.read(f"SELECT COUNT(*) AS number FROM {of} WHERE a.tenant = ?{only}", asked)
        source = f"{of} JOIN lane l ON l.id = a.id WHERE a.tenant = ?{only}" if only else "lane l WHERE l.tenant = ?"
        wanted = self._database.read(
            f"SELECT l.id FROM {source} AND l.requested_at IS NOT NULL ORDER BY l.requested_at DESC, l.id DESC"
            " LIMIT ? OFFSET ?",
            (*asked, limit, offset),
        )
        ids = [row.id for row in wanted]
        rows = self._database.read(f"SELECT {_COLUMNS} FROM adapter a WHERE a.id IN ({placeholders(ids)})", ids)
        found = {row.id: _adapter_of(row) for row in rows}
        return [found[one] for one in ids if one in found], int(counted.number)

    def newest_of(self, tenant: str, *, limit: int, after: PlaceInList | None = None) -> list[Adapter]:
        """Some of a tenant's training runs, newest first: those behind a place, if one is given. One query."""
        behind = "" if after is None else " AND (created_at, id) < (?, ?)"
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM adapter a WHERE tenant = ?{behind} ORDER BY created_at DESC, id DESC LIMIT ?",
            (tenant, *(() if after is None else (after.created_at, after.id)), limit),
        )
        return [_adapter_of(row) for row in rows]

    def newest(self, *, limit: int) -> list[Adapter]:
        """The newest training runs of every tenant."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM adapter a ORDER BY a.created_at DESC, a.id LIMIT ?", (limit,)
        )
        return [_adapter_of(row) for row in rows]

    def last_requests_at(self, adapter_ids: Sequence[str]) -> dict[str, float]:
        """When the latest operation of each of these adapters was accepted, or else the adapter made."""
        rows = self._database.read(
            f"SELECT id, requested_at FROM lane WHERE id IN ({placeholders(adapter_ids)}) AND requested_at IS NOT NULL",
            adapter_ids,
        )
        return {row.id: row.requested_at for row in rows}

    def next_seq(self, adapter_id: str) -> int:
        """The number after the highest one that the adapter has seen."""
        rows = self._database.read("SELECT max_seq + 1 - num_rewinds AS seq FROM lane WHERE id = ?", (adapter_id,))
        return int(rows[0].seq)

    def abandoned(self, mesh: str, *, silent_s: float, besides: Sequence[str], limit: int) -> list[tuple[str, int]]:
        """Adapters that are not parked though nothing waits for them and their session has ended or is silent so long.

        Args:
            mesh: Whose adapters.
            silent_s: How long a session may say nothing.
            besides: Adapters that are not meant.
            limit: How many at most.

        Returns:
            Each with the number of its last operation.
        """
        others = ["", *besides]
        rows = self._database.read(
            "SELECT a.id, l.head_seq - 1 AS last_seq FROM adapter a JOIN session s ON s.id = a.session"
            " JOIN lane l ON l.id = a.id"
            " WHERE a.mesh = ? AND a.parked_at IS NULL AND a.pinned_at IS NULL"
            " AND l.ordered AND l.head_kind IS NULL AND l.head_seq > 0 AND l.unload_seq IS NULL"
            " AND (s.finished_at IS NOT NULL OR s.heartbeat_at <= ?)"
            f" AND a.id NOT IN ({placeholders(others)}) ORDER BY a.id LIMIT ?",
            (mesh, self._clock.now() - silent_s, *others, limit),
        )
        return [(row.id, row.last_seq) for row in rows]

    def park(self, adapter: str, *, last_seq: int) -> bool:
        """Note that an adapter lies in the object store only; false when it has got work meanwhile."""
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE adapter SET parked_at = ? WHERE id = ? AND EXISTS"
                " (SELECT 1 FROM lane l WHERE l.id = adapter.id AND l.head_seq = ? AND l.head_kind IS NULL)",
                (self._clock.now(), adapter, last_seq + 1),
            ).rowcount
        return changed == 1

    def resume(self, adapter: str) -> None:
        """Note that an adapter is in use again."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE adapter SET parked_at = NULL WHERE id = ? AND parked_at IS NOT NULL", (adapter,)
            )

    def pin(self, adapter: str, *, is_pinned: bool) -> bool:
        """Keep an adapter on its device once it is there, or no longer; false when there is none of the name."""
        pinned_at = self._clock.now() if is_pinned else None
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                "UPDATE adapter SET pinned_at = ? WHERE id = ?", (pinned_at, adapter)
            ).rowcount
        return changed == 1

    def pinned(self, adapters: Sequence[str]) -> list[str]:
        """Those of these that are pinned, the longest pinned first."""
        if not adapters:
            return []
        rows = self._database.read(
            f"SELECT id FROM adapter WHERE id IN ({placeholders(adapters)}) AND pinned_at IS NOT NULL"
            " ORDER BY pinned_at, id",
            tuple(adapters),
        )
        return [row.id for row in rows]

    def unload(self, adapter: str, tenant: str, *, request_key: str | None = None) -> Accepted:
        """End an adapter in its turn. Doing it again answers the same.

        So does a resend under its key, also where ``adapter`` is by now another one of the session, under the name of
        the one that was ended.

        The operation is numbered behind everything its lane has seen, so what was accepted before is executed before
        it. Checkpoints and the sampling sessions on them stay; what the adapter would be rebuilt from goes once it is
        done.

        Raises:
            NotFound: There is no such adapter, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [adapter]).get(adapter)
            if lane is None or lane.tenant != tenant or not lane.ordered:
                raise NotFound(f"no adapter {adapter!r}")
            if lane.unload_seq is not None:
                request_id = request_id_of(adapter, lane.unload_seq)
                return Accepted(request_id=request_id, mesh=lane.mesh, is_new=False)
            earlier = None if request_key is None else _unloaded_before(transaction, adapter, request_key)
            if earlier is not None:
                return earlier
            submission = Submission(
                tenant=tenant,
                lane=adapter,
                seq=lane.next_seq,
                kind=OperationKind.UNLOAD_MODEL,
                digest=sha256(b"").hexdigest(),
                payload=Payload(inline=b""),
                request_key=request_key,
            )
            accepted = accept_own(transaction, lane, submission, now=self._clock.now())
            transaction.execute("UPDATE lane SET unload_seq = ? WHERE id = ?", (submission.seq, adapter))
            return accepted

    def is_unloaded(self, adapter: str) -> bool:
        """Whether its client has ended it: nothing new is accepted for it."""
        return bool(self._database.read("SELECT id FROM lane WHERE id = ? AND unload_seq IS NOT NULL", (adapter,)))

    def refuse_unloaded(self, adapter: str) -> None:
        """Raise what everything is answered that comes for an adapter that was unloaded.

        Raises:
            InvalidInput: It was.
        """
        if self.is_unloaded(adapter):
            raise unloaded_error(adapter)


def _adapter_of(row: Row) -> Adapter:
    return Adapter(
        id=row.id,
        tenant=row.tenant,
        session=row.session,
        mesh=row.mesh,
        config=AdapterConfig.model_validate_json(row.config),
        optimizer=json.loads(row.optimizer),
        user_metadata=None if row.user_metadata is None else json.loads(row.user_metadata),
        created_at=row.created_at,
        parked_at=row.parked_at,
        pinned_at=row.pinned_at,
    )


def _unloaded_before(transaction: Transaction, adapter: str, request_key: str) -> Accepted | None:
    """Of the adapter's session, the one that was ended under this key."""
    row = transaction.execute(
        "SELECT l.id, l.mesh, l.unload_seq FROM adapter a JOIN adapter b ON b.session = a.session"
        " JOIN lane l ON l.id = b.id JOIN operation o ON o.lane = l.id AND o.seq = l.unload_seq"
        " WHERE a.id = ? AND o.request_key = ?",
        (adapter, request_key),
    ).fetchone()
    if row is None:
        return None
    return Accepted(request_id=request_id_of(row.id, row.unload_seq), mesh=row.mesh, is_new=False)
