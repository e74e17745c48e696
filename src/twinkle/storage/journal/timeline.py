"""What the journal knows of a session's past: its lanes and when their operations came, began and ended. Never data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from twinkle.core.errors import NotFound
from twinkle.core.operation import OperationKind, OperationState
from twinkle.storage.database import Database, Row

_OPERATIONS_A_PAGE = 256
# The lanes of a session are sorted anew for each page.
_LANES_A_PAGE = 2000

_OPERATION_COLUMNS = (
    "request_id, seq, kind, state, mesh, attempts, claim_epoch, accepted_at, started_at, finished_at, not_before,"
    " error, error_category, error_code, num_tokens, num_prompt_tokens, device_s, payload_bytes"
)


@dataclass(frozen=True, kw_only=True)
class SessionTimes:
    """A session's own times, in Unix seconds; ``finished_at`` is set if its client said goodbye."""

    id: str
    created_at: float
    heartbeat_at: float
    finished_at: float | None
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class SessionLane:
    """A training run, or a sampling session, of which the journal keeps neither a time nor a rank."""

    id: str
    is_run: bool
    base_model: str
    model_path: str | None
    """The checkpoint that is sampled from, as its owner named it."""
    rank: int | None
    created_at: float | None
    parked_at: float | None


@dataclass(frozen=True, kw_only=True)
class PastOrPresent:
    """An operation and its times. Of several attempts only the last one's beginning is known, and their number."""

    request_id: str
    seq: int
    kind: OperationKind
    state: OperationState
    mesh: str
    attempts: int
    accepted_at: float
    started_at: float | None
    finished_at: float | None
    is_held: bool
    """Whether a worker holds it, or did when it ended."""
    next_try_at: float | None
    error: str | None
    """Why it failed, or why the last attempt did."""
    error_category: str | None
    error_code: str | None
    num_tokens: int
    num_prompt_tokens: int
    device_s: float
    payload_bytes: int

    @property
    def ran_from(self) -> float | None:
        """When the attempt began that runs, or that ended it; ``None`` if it waits, or ended while it waited."""
        return self.started_at if self.is_held else None


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """How long a stretch of a lane's operations stood in line, and how long they were computed, in seconds.

    One stands in line from when it has come and the one before it has ended until its last attempt begins.
    """

    last_seq: int
    """The last one of the stretch: all up to it have ended."""
    queue_s: float
    compute_s: float


class Timeline:
    """Reads sessions page by page: what is in memory does not grow with them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def session(self, session_id: str) -> SessionTimes:
        """A session, whoever owns it.

        Raises:
            NotFound: There is none.
        """
        rows = self._database.read(
            "SELECT created_at, heartbeat_at, finished_at, finish_reason FROM session WHERE id = ?", (session_id,)
        )
        if not rows:
            raise NotFound(f"no session {session_id!r}")
        (row,) = rows
        return SessionTimes(
            id=session_id,
            created_at=row.created_at,
            heartbeat_at=row.heartbeat_at,
            finished_at=row.finished_at,
            finish_reason=row.finish_reason,
        )

    def lanes(self, session_id: str) -> Iterator[SessionLane]:
        """A session's training runs, then its sampling sessions, each in the order of their ids."""
        runs = "SELECT id, config, created_at, parked_at FROM adapter WHERE session = ? AND id > ?"
        for row in self._pages(f"{runs} ORDER BY id LIMIT ?", session_id, after="", key="id", size=_LANES_A_PAGE):
            yield _run_of(row)
        samplers = "SELECT id, base_model, model_path FROM sampling_session WHERE session = ? AND id > ?"
        for row in self._pages(f"{samplers} ORDER BY id LIMIT ?", session_id, after="", key="id", size=_LANES_A_PAGE):
            yield _sampler_of(row)

    def operations(self, lane: str, *, until: float) -> Iterator[PastOrPresent]:
        """A lane's operations that were accepted by ``until``, in the order of their numbers."""
        sql = f"SELECT {_OPERATION_COLUMNS} FROM operation WHERE lane = ? AND seq > ? ORDER BY seq LIMIT ?"
        for row in self._pages(sql, lane, after=-1, key="seq", size=_OPERATIONS_A_PAGE):
            operation = _operation_of(row)
            if operation.accepted_at <= until:
                yield operation

    def spent(self, lane: str, *, after: int) -> TimeSpent:
        """What the operations of a lane behind number ``after`` took, up to the first that has not ended."""
        sql = (
            "SELECT seq, accepted_at, started_at, finished_at FROM operation"
            " WHERE lane = ? AND seq > ? ORDER BY seq LIMIT ?"
        )
        last_seq, queue_s, compute_s, ended_at = after, 0.0, 0.0, 0.0
        # The one at ``after`` says since when the next one could begin.
        for row in self._pages(sql, lane, after=after - 1, key="seq", size=_OPERATIONS_A_PAGE):
            if row.finished_at is None:
                break
            if row.seq > after:
                began_at = row.finished_at if row.started_at is None else row.started_at
                queue_s += max(0.0, began_at - max(row.accepted_at, ended_at))
                compute_s += row.finished_at - began_at
            last_seq, ended_at = row.seq, row.finished_at
        return TimeSpent(last_seq=last_seq, queue_s=queue_s, compute_s=compute_s)

    def _pages(self, sql: str, of: str, *, after: str | int, key: str, size: int) -> Iterator[Row]:
        """The rows behind ``after`` by the column ``key``, in queries of one page each."""
        while True:
            rows = self._database.read(sql, (of, after, size))
            yield from rows
            if len(rows) < size:
                return
            after = getattr(rows[-1], key)


def _run_of(row: Row) -> SessionLane:
    config = json.loads(row.config)
    return SessionLane(
        id=row.id,
        is_run=True,
        base_model=str(config["base_model"]),
        model_path=None,
        rank=int(config["rank"]),
        created_at=row.created_at,
        parked_at=row.parked_at,
    )


def _sampler_of(row: Row) -> SessionLane:
    return SessionLane(
        id=row.id,
        is_run=False,
        base_model=row.base_model,
        model_path=row.model_path,
        rank=None,
        created_at=None,
        parked_at=None,
    )


def _operation_of(row: Row) -> PastOrPresent:
    state = OperationState(row.state)
    is_to_be_retried = state is OperationState.QUEUED and row.attempts > 0
    return PastOrPresent(
        request_id=row.request_id,
        seq=row.seq,
        kind=OperationKind(row.kind),
        state=state,
        mesh=row.mesh,
        attempts=row.attempts,
        accepted_at=row.accepted_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        is_held=row.claim_epoch > 0,
        next_try_at=row.not_before if is_to_be_retried else None,
        error=row.error,
        error_category=row.error_category,
        error_code=row.error_code,
        num_tokens=row.num_tokens,
        num_prompt_tokens=row.num_prompt_tokens,
        device_s=row.device_s,
        payload_bytes=row.payload_bytes,
    )
