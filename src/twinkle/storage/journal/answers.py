"""What the journal answers of operations: their rows into futures, failures and what a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import Expired
from twinkle.core.operation import Failure, FailureCategory, FutureStatus, OperationKind, OperationState, Payload
from twinkle.storage.database import Database, Row, placeholders
from twinkle.storage.journal.forgotten import owners_of_forgotten, why_forgotten
from twinkle.storage.journal.records import PastOperation

_STATUS_COLUMNS = (
    "request_id, tenant, kind, state, lane, seq, attempts, result, result_blob,"
    " error, error_category, error_code, expired, mesh, result_bytes"
)
PAST_COLUMNS = "seq, kind, payload, payload_blob, state, error_code, request_id, payload_bytes, num_tokens"


@dataclass(frozen=True, kw_only=True)
class OwnedStatus:
    """A future's status, whose it is, and which mesh it waits for."""

    tenant: str
    mesh: str
    status: FutureStatus


def _payload_of(row: Row) -> Payload:
    return Payload(inline=row.payload, blob=row.payload_blob, blob_bytes=row.payload_bytes)


def past_of(row: Row) -> PastOperation:
    """What a replay needs of an operation."""
    return PastOperation(
        request_id=row.request_id,
        seq=row.seq,
        kind=OperationKind(row.kind),
        payload=_payload_of(row),
        succeeded=row.state == OperationState.DONE,
        error_code=row.error_code,
        num_tokens=row.num_tokens,
    )


def failure_of(row: Row) -> Failure:
    """Why an operation failed."""
    return Failure(message=row.error, category=FailureCategory(row.error_category), code=row.error_code)


def read_statuses(database: Database, request_ids: Sequence[str]) -> dict[str, OwnedStatus]:
    """The futures that exist among these, or did; in one query, unless some have no row."""
    marks = placeholders(request_ids)
    rows = database.read(f"SELECT {_STATUS_COLUMNS} FROM operation WHERE request_id IN ({marks})", request_ids)
    found = {row.request_id: _status_of(row) for row in rows}
    missing = [request_id for request_id in request_ids if request_id not in found]
    owners = owners_of_forgotten(database, missing)
    return found | {request_id: _forgotten_status(request_id, owner) for request_id, owner in owners.items()}


def _status_of(row: Row) -> OwnedStatus:
    """Where an operation stands."""
    state = OperationState(row.state)
    result = Payload(inline=row.result, blob=row.result_blob, blob_bytes=row.result_bytes or 0)
    status = FutureStatus(
        request_id=row.request_id,
        kind=OperationKind(row.kind),
        state=state,
        lane=row.lane,
        seq=row.seq,
        attempt=row.attempts,
        result=result if state is OperationState.DONE else None,
        failure=failure_of(row) if state is OperationState.FAILED else None,
        expired=bool(row.expired),
    )
    return OwnedStatus(tenant=row.tenant, mesh=row.mesh, status=status)


def _forgotten_status(request_id: str, tenant: str) -> OwnedStatus:
    """Where an operation stands whose row is gone: it has ended, and nobody knows how."""
    lane, _, seq = request_id.rpartition(":req:")
    failure = Failure(message=why_forgotten(request_id), category=FailureCategory.USER, code=Expired.code)
    status = FutureStatus(
        request_id=request_id,
        kind=OperationKind.GAP,
        state=OperationState.FAILED,
        lane=lane,
        seq=int(seq),
        attempt=0,
        result=None,
        failure=failure,
        expired=True,
    )
    return OwnedStatus(tenant=tenant, mesh="", status=status)
