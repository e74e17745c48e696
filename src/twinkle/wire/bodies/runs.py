"""Bodies of what can be done with a run as a whole: look at it, fork it, rewind it."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from twinkle.wire.bodies.base import MAX_INT64, Identifier, RequestBody, ResponseBody, SeqId
from twinkle.wire.bodies.checkpoints import CheckpointInfo


class PastState(RequestBody):
    """A past state of a run: after a step of its optimizer, or after an operation of the journal. Exactly one."""

    step: int | None = Field(default=None, ge=0, le=MAX_INT64)
    operation: int | None = Field(default=None, ge=0, le=MAX_INT64)


class TimesResponse(ResponseBody):
    """``GET runs/{run_id}/times``: how long a run's operations stood in line, and how long they were computed.

    They are those behind ``after`` up to ``last_operation``, behind which one has not ended.
    """

    run_id: str
    last_operation: int
    queue_s: float
    compute_s: float


class RewindRequest(PastState):
    """``POST runs/{run_id}/rewind``."""


class ForkRequest(PastState):
    """``POST runs/{run_id}/fork``. Without a session the new run gets one of its own.

    ``dialect`` is the one that the new run is trained through, the source's if nothing is said.
    """

    session_id: Identifier | None = None
    model_seq_id: SeqId = 0
    dialect: Literal["tinker", "twinkle"] | None = None


class BranchTicket(ResponseBody):
    """Where the outcome of a fork or a rewind will be, and which state was meant."""

    request_id: str
    run_id: str
    source: str
    operation: int


class BranchResponse(ResponseBody):
    """What a fork or a rewind came to."""

    type: str = "branch"
    run_id: str
    source: str
    operation: int
    num_replayed: int


class BranchInfo(ResponseBody):
    """A place where a run takes up a past state of its own or of another run."""

    run_id: str
    operation: int
    source: str
    source_operation: int
    time: datetime


class StepInfo(ResponseBody):
    """A step of the optimizer, and the operation that made it."""

    step: int
    operation: int
    time: datetime


class SnapshotInfo(ResponseBody):
    """A recovery point that is kept."""

    operation: int
    size_bytes: int
    time: datetime


class HistoryResponse(ResponseBody):
    """``GET runs/{run_id}/history``: how far back a run can be taken, and what keeping that costs."""

    run_id: str
    parked_at: datetime | None = None
    earliest_operation: int
    num_steps: int
    steps: list[StepInfo]
    origin: BranchInfo | None = None
    rewinds: list[BranchInfo]
    forks: list[BranchInfo]
    snapshots: list[SnapshotInfo]
    snapshot_bytes: int
    num_payloads: int
    payload_bytes: int


class ListedRun(ResponseBody):
    """A training run in a list."""

    run_id: str
    session_id: str
    base_model: str
    rank: int
    created_at: datetime
    user_metadata: dict[str, str] | None = None


class RunsPage(ResponseBody):
    """``GET runs``; without a cursor it was the last page."""

    runs: list[ListedRun]
    cursor: str | None = None


class CheckpointsPage(ResponseBody):
    """``GET checkpoints``; without a cursor it was the last page."""

    checkpoints: list[CheckpointInfo]
    cursor: str | None = None
