"""Where an operation stands in line, and why it does not run yet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinkle.core.operation import OperationKind, OperationState


class WaitReason(StrEnum):
    """Why an operation is where it is: the whole list, and its words never change."""

    QUEUED = "queued"
    """It may run, and others are served first."""
    RUNNING = "running"
    DONE = "done"
    WAITING_FOR_PREDECESSOR = "waiting_for_predecessor"
    """An earlier operation of its adapter has not ended."""
    WAITING_FOR_GAP = "waiting_for_gap"
    """An earlier number of its adapter has not arrived."""
    RATE_LIMITED = "rate_limited"
    """Its tenant has used up its tokens per minute."""
    RETRY_BACKOFF = "retry_backoff"
    """An attempt failed, and the next one is due at a known time."""
    MESH_UNAVAILABLE = "mesh_unavailable"
    """No worker of its mesh lives."""


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """A place in a queue: so many operations are before it, ``num_own_before`` of them of its own tenant.

    Where ``is_exact`` is false it is a lower bound: not all of a very long queue is looked at.
    """

    num_before: int
    num_own_before: int
    num_tokens_before: int
    is_exact: bool


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All that an operation's owner may know while it waits. Times are Unix seconds."""

    request_id: str
    kind: OperationKind
    state: OperationState
    mesh: str
    lane: str
    seq: int
    reason: WaitReason
    waits_for_seq: int | None
    place: QueuePlace | None
    starts_in_s: float | None
    attempt: int
    max_attempts: int
    last_error: str | None
    next_try_at: float | None
    accepted_at: float

    @property
    def is_paused(self) -> bool:
        """Whether something other than the line keeps it."""
        return self.reason in {WaitReason.RATE_LIMITED, WaitReason.MESH_UNAVAILABLE}
