"""The job: a batch or a recipe that the service runs itself, for a tenant that may be away.

Its plan is deterministic, so whoever takes it up submits the same operations with the same numbers and goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from twinkle.core.errors import TwinkleError, writable

JsonObject: TypeAlias = dict[str, Any]
"""What is kept as JSON and told as it is."""

DEFAULT_NICE = 50
"""A job's work waits behind everything interactive, unless its owner says otherwise."""

MAX_NICE = 100


class JobKind(StrEnum):
    """What a job does: the name of its plan."""

    BATCH = "batch"
    OPS = "ops"
    SUPERVISED = "sft"
    PREFERENCE = "dpo"
    REINFORCEMENT = "grpo"
    DISTILL = "distill"
    EXPORT = "export"
    SCRIPT = "script"
    SWEEP = "sweep"
    FLOW = "flow"
    CHECK = "check"


GROUPS = frozenset({JobKind.SWEEP, JobKind.FLOW})
"""Kinds of jobs that are made of others, and come to their result when those have ended."""


class JobState(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    """For jobs that have to end first."""
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    RETRYING = "retrying"
    """Its last attempt failed for a reason that may pass; the next one comes at ``not_before``."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more happens by itself."""
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

EventKind: TypeAlias = Literal["status", "message", "metrics", "sample", "checkpoint", "attempt"]


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened in a job; ``number`` is set where it is read."""

    kind: EventKind
    message: str
    data: JsonObject = field(default_factory=dict)
    number: int = 0
    at: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", writable(self.message))


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a job, or one attempt at it, failed."""

    code: str
    message: str
    is_transient: bool = False
    """Whether another attempt may succeed."""
    field: str | None = None
    """The field of the spec that is to blame."""
    details: JsonObject = dataclasses.field(default_factory=dict)
    """More of it, such as the first errors of a file under ``errors``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", writable(self.message))


class JobFailed(Exception):
    """A plan's own words for why it cannot go on. Anything else that it raises may pass, and is tried again."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        is_transient: bool = False,
        field: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.failure = JobFailure(
            code=code, message=message, is_transient=is_transient, field=field, details=dict(details or {})
        )


class JobInterrupted(Exception):
    """A plan is to stop at a safe point: what it saved is what it goes on from."""


class JobPaused(JobInterrupted):
    """Its owner paused it."""


class JobCancelled(JobInterrupted):
    """Its owner cancelled it: whoever catches this leaves a checkpoint or partial results, and raises it again."""

    def __init__(self, message: str, *, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.result = None if result is None else dict(result)
        """What there is to show for it; a plan may set it before it raises this again."""


class JobRests(JobInterrupted):
    """Its plan has nothing to do for a while, and leaves its place to another job. No attempt is used up."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"rests for {seconds:.0f} s")
        self.seconds = seconds


class JobLost(TwinkleError):
    """Another runner holds the job now, or it has ended; nothing of ours may be written."""

    code = "job_lost"


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """Another job that has to end first: successfully (``ok``), or in whatever way (``any``)."""

    job: str
    condition: Literal["ok", "any"] = "ok"


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A job as it is submitted. Its spec was validated before, and is never changed."""

    id: str
    tenant: str
    kind: JobKind
    spec: JsonObject
    digest: str
    """Of kind and spec: it tells a resend from another job under the same ``client_id``."""
    client_id: str | None = None
    """Chosen by the client: it makes submitting idempotent."""
    name: str | None = None
    after: tuple[Dependency, ...] = ()
    parent: str | None = None
    nice: int = DEFAULT_NICE
    """Of its operations too, as their session's priority turned round; 0 goes with what is interactive."""
    max_attempts: int = 3
    """Attempts in a row that bring it no further; then it has failed."""
    notify_url: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    expires_at: float | None = None
    """When its plan is to end it with what there is, such as a batch after its window."""
    seed: int | None = None
    """What its random numbers are drawn from; by default its id."""
    at_once: int | None = None
    """How many members of its parent may run at the same time, if not all."""

    @property
    def drawn_seed(self) -> int:
        """The seed it runs with."""
        return seed_of_text(self.id) if self.seed is None else self.seed


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it stands."""

    id: str
    tenant: str
    kind: JobKind
    spec: JsonObject
    digest: str
    client_id: str | None
    name: str | None
    parent: str | None
    nice: int
    max_attempts: int
    notify_url: str | None
    metadata: dict[str, str]
    seed: int
    state: JobState
    phase: str | None
    progress: JsonObject
    """``done``, ``total``, ``unit``, and what the plan adds."""
    result: JsonObject | None
    failure: JobFailure | None
    attempt: int
    num_failures: int
    """Attempts in a row that brought it no further."""
    not_before: float
    created_at: float
    started_at: float | None
    finished_at: float | None
    expires_at: float | None
    cancel_requested: bool
    pause_requested: bool
    cancel_requested_at: float | None = None

    @property
    def priority(self) -> int:
        """Of its operations, as sessions say it: the highest goes first."""
        return -self.nice


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """One attempt at a job, and how it ended: ``succeeded``, ``failed``, ``lost``, ``cancelled``."""

    attempt: int
    owner: str
    started_at: float
    ended_at: float | None
    outcome: str | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class JobMember:
    """One of the jobs that a sweep or a flow is made of, as far as that one needs to know it."""

    id: str
    name: str
    kind: JobKind
    state: JobState
    progress: JsonObject
    result: JsonObject | None
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class JobClaim:
    """A runner's time-bounded, exclusive right to a job. Its epoch fences every write."""

    job: Job
    epoch: int
    lease_s: float
    saved: JsonObject
    """Where its plan stands, as it was last saved."""


@dataclass(frozen=True, kw_only=True)
class JobSignals:
    """What a job's owner wants of whoever runs it."""

    cancel: bool
    pause: bool


def seed_of_text(text: str) -> int:
    """A seed of 31 bits that follows from a text."""
    return int.from_bytes(sha256(text.encode()).digest()[:4]) & 0x7FFFFFFF
