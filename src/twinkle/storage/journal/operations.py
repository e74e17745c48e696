"""Operations as the operator sees them: over all tenants, those that wait, run or failed; and to end one that waits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, Expired, NotFound
from twinkle.core.operation import CANCELLED_BY_OPERATOR, OperationKind, OperationState
from twinkle.storage.database import Database, Row, placeholders
from twinkle.storage.journal.forgotten import owners_of_forgotten, why_forgotten
from twinkle.storage.journal.lanes import lock_lanes
from twinkle.storage.tenants.audit import insert_entry

_COLUMNS = (
    "o.request_id, o.tenant, t.name AS tenant_name, o.lane, o.mesh, o.seq, o.kind, o.state, o.attempts, o.suspicions,"
    " o.error, o.error_code, o.rejection, o.num_tokens, o.payload_bytes, o.device_s, o.accepted_at, o.started_at,"
    " o.finished_at FROM operation o JOIN tenant t ON t.id = o.tenant"
)
_OPEN = frozenset({OperationState.QUEUED, OperationState.RUNNING})


@dataclass(frozen=True, kw_only=True)
class OperationInfo:
    """An operation without its data. ``tenant`` is a name, ``tenant_id`` whose it is in other tables."""

    request_id: str
    tenant: str
    tenant_id: str
    lane: str
    mesh: str
    seq: int
    kind: OperationKind
    state: OperationState
    attempts: int
    suspicions: int
    """At how many of them its worker died or the device failed."""
    message: str | None
    """Why it failed, or why its last attempt did."""
    code: str | None
    is_cancelled: bool
    """Whether it will end as cancelled when its turn comes."""
    num_tokens: int
    payload_bytes: int
    device_s: float
    accepted_at: float
    started_at: float | None
    finished_at: float | None


class Operations:
    """Looks at single operations; cancels one that waits."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def page(
        self,
        states: Collection[OperationState],
        *,
        tenant: str | None = None,
        mesh: str | None = None,
        limit: int,
    ) -> list[OperationInfo]:
        """Some operations in these states: those that are open by their age, those that have ended by their end.

        Args:
            states: Which; the ended ones are those whose results are kept still.
            tenant: Of one tenant only, by its name.
            mesh: Of one mesh only.
            limit: The oldest open ones, and of the others the latest, so many of either.
        """
        only, parameters = "", []
        for column, value in (("t.name", tenant), ("o.mesh", mesh)):
            if value is not None:
                only += f" AND {column} = ?"
                parameters.append(value)
        found: list[Row] = []
        still_open = sorted(_OPEN & frozenset(states))
        if still_open:
            # The condition is the index's own: the states asked for are few of few.
            found += self._database.read(
                f"SELECT {_COLUMNS} WHERE o.state IN ('queued', 'running') AND o.state IN"
                f" ({placeholders(still_open)}){only} ORDER BY o.accepted_at, o.lane, o.seq LIMIT ?",
                (*(state.value for state in still_open), *parameters, limit),
            )
        ended = sorted(frozenset(states) - _OPEN)
        if ended:
            found += self._database.read(
                f"SELECT {_COLUMNS} WHERE o.finished_at IS NOT NULL AND NOT o.expired AND o.held_by IS NULL"
                f" AND o.state IN ({placeholders(ended)}){only} ORDER BY o.finished_at DESC LIMIT ?",
                (*(state.value for state in ended), *parameters, limit),
            )
        return [_info(row) for row in found]

    def find(self, request_id: str) -> OperationInfo:
        """One operation.

        Raises:
            NotFound: There is none of that id.
            Expired: It has been forgotten.
        """
        rows = self._database.read(f"SELECT {_COLUMNS} WHERE o.request_id = ?", (request_id,))
        if not rows:
            if owners_of_forgotten(self._database, [request_id]):
                raise Expired(why_forgotten(request_id))
            raise NotFound(f"no operation {request_id!r}; `twinkle ops list` shows those that wait or have failed")
        return _info(rows[0])

    def cancel(self, request_id: str, *, reason: str) -> OperationInfo:
        """Let a training operation that waits end as cancelled when its turn comes: its successors go on behind it.

        Raises:
            NotFound: There is none of that id.
            Conflict: It runs, has ended, or begins a run; or it is a sample, which is cancelled as samples are.
        """
        found = self.find(request_id)
        if not found.kind.is_ordered:
            raise Conflict(f"{request_id} is a {found.kind}, which waits for no turn")
        if found.seq == 0:
            raise Conflict(f"{request_id} begins its run, which would be left without a beginning")
        with self._database.transaction() as transaction:
            lock_lanes(transaction, [found.lane])
            changed = transaction.execute(
                "UPDATE operation SET rejection = ? WHERE request_id = ? AND state = 'queued' AND rejection IS NULL",
                (f"{CANCELLED_BY_OPERATOR}: {reason}", request_id),
            ).rowcount
            if changed == 1:
                details = {"request_id": request_id, "reason": reason}
                insert_entry(transaction, found.tenant_id, "operation_cancel", details, now=self._clock.now())
        now = self.find(request_id)
        if not now.is_cancelled:
            raise Conflict(f"{request_id} is {now.state}; only what waits can be cancelled, and it ends as it would")
        return now


def _info(row: Row) -> OperationInfo:
    return OperationInfo(
        request_id=row.request_id,
        tenant=row.tenant_name,
        tenant_id=row.tenant,
        lane=row.lane,
        mesh=row.mesh,
        seq=row.seq,
        kind=OperationKind(row.kind),
        state=OperationState(row.state),
        attempts=row.attempts,
        suspicions=row.suspicions,
        message=row.error or row.rejection,
        code=row.error_code,
        is_cancelled=row.rejection is not None and row.rejection.startswith(CANCELLED_BY_OPERATOR),
        num_tokens=row.num_tokens,
        payload_bytes=row.payload_bytes,
        device_s=row.device_s,
        accepted_at=row.accepted_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
