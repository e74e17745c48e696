"""OpenAI's batches: what asks for one, and how a job of that kind looks in their words."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from twinkle.core.job import Job, JobState
from twinkle.wire.bodies.base import Identifier, Metadata, RequestBody
from twinkle.wire.bodies.jobs_batch import MAX_OUTPUT_S, MIN_OUTPUT_S, BatchEndpoint

WINDOW_S = 24 * 3600.0

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

_EXPIRED = "expired"
_NOTHING_ELSE = ConfigDict(extra="forbid")
_STATUS_OF_PHASE: dict[str | None, Status] = {"in_progress": "in_progress", "finalizing": "finalizing"}


class OutputExpiry(RequestBody):
    """How long the files of a batch are kept, from their making on."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_OUTPUT_S, le=MAX_OUTPUT_S)


class CreateBatchRequest(RequestBody):
    """``POST /v1/batches``."""

    input_file_id: Annotated[Identifier, Field(pattern=r"^[^/]+$")]
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


@with_config(_NOTHING_ELSE)
class BatchError(TypedDict):
    """Something that is wrong with a batch, or with a line of its file."""

    code: str | None
    line: int | None
    message: str | None
    param: str | None


@with_config(_NOTHING_ELSE)
class BatchErrors(TypedDict):
    """The first hundred."""

    object: Literal["list"]
    data: list[BatchError]


@with_config(_NOTHING_ELSE)
class BatchCounts(TypedDict):
    """How many lines there are, and what came of them."""

    total: int
    completed: int
    failed: int


@with_config(_NOTHING_ELSE)
class InputDetails(TypedDict):
    """Always 0: which prompts were found computed is a matter of chance, and no part of a batch's result."""

    cached_tokens: int


@with_config(_NOTHING_ELSE)
class OutputDetails(TypedDict):
    """Always 0: they are among the output tokens."""

    reasoning_tokens: int


@with_config(_NOTHING_ELSE)
class BatchUsage(TypedDict):
    """Tokens of all answers so far."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


@with_config(_NOTHING_ELSE)
class BatchObject(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


@with_config(_NOTHING_ELSE)
class BatchList(TypedDict):
    """``GET /v1/batches``, newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def status_of(job: Job) -> Status:
    """Where a batch is. A paused one is told as it was before: the word is not OpenAI's."""
    if job.state is JobState.SUCCEEDED:
        return "completed"
    if job.state is JobState.CANCELLED:
        return "cancelled"
    if job.state is JobState.FAILED:
        return "expired" if job.failure is not None and job.failure.code == _EXPIRED else "failed"
    if job.cancel_requested:
        return "cancelling"
    return _STATUS_OF_PHASE.get(job.phase, "validating")


def show(job: Job) -> BatchObject:
    """A job of kind ``batch``."""
    status, progress = status_of(job), job.progress
    result = (job.failure.details if status == _EXPIRED and job.failure else job.result) or {}
    tokens_in, tokens_out = int(progress.get("input_tokens") or 0), int(progress.get("output_tokens") or 0)

    def ended(as_what: Status) -> int | None:
        return _second(job.finished_at) if status == as_what else None

    return BatchObject(
        id=job.id,
        object="batch",
        endpoint=job.spec["endpoint"],
        model=progress.get("model"),
        errors=_errors(job) if status == "failed" else None,
        input_file_id=job.spec["data"],
        completion_window="24h",
        status=status,
        output_file_id=result.get("output_file_id"),
        error_file_id=result.get("error_file_id"),
        created_at=int(job.created_at),
        in_progress_at=_second(progress.get("in_progress_at")),
        expires_at=_second(job.expires_at),
        finalizing_at=_second(progress.get("finalizing_at")),
        completed_at=ended("completed"),
        failed_at=ended("failed"),
        expired_at=ended("expired"),
        cancelling_at=_second(job.cancel_requested_at),
        cancelled_at=ended("cancelled"),
        request_counts=BatchCounts(
            total=int(progress.get("total") or 0),
            completed=int(progress.get("completed") or 0),
            failed=int(progress.get("failed") or 0),
        ),
        usage=BatchUsage(
            input_tokens=tokens_in,
            input_tokens_details=InputDetails(cached_tokens=0),
            output_tokens=tokens_out,
            output_tokens_details=OutputDetails(reasoning_tokens=0),
            total_tokens=tokens_in + tokens_out,
        ),
        metadata=job.metadata or None,
    )


def _errors(job: Job) -> BatchErrors | None:
    failure = job.failure
    if failure is None:
        return None
    found = failure.details.get("errors") or [{"code": failure.code, "message": failure.message}]
    data = [
        BatchError(
            code=error.get("code"), line=error.get("line"), message=error.get("message"), param=error.get("param")
        )
        for error in found
    ]
    return BatchErrors(object="list", data=data)


def _second(time: float | None) -> int | None:
    return None if time is None else int(time)
