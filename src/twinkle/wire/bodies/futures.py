"""Bodies of futures: the claim ticket, the long poll, and the ways it ends."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from twinkle.wire.bodies.base import MAX_INT32, Identifier, RequestBody, ResponseBody, SeqId

QueueState: TypeAlias = Literal["active", "paused_capacity", "paused_rate_limit"]
ErrorCategory: TypeAlias = Literal["user", "server", "unknown"]


class FutureResponse(ResponseBody):
    """An operation was accepted. A sample must carry one sequence id for each sample it asked for."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFutureRequest(RequestBody):
    """``POST retrieve_future``."""

    request_id: Identifier
    allow_metadata_only: bool = False


class PendingResponse(ResponseBody):
    """Sent with status 408 when a long poll ends without a result; the client asks again at once."""

    queue_state: QueueState = "active"
    queue_state_reason: str | None = None


class FailedResponse(ResponseBody):
    """The operation ended in an error; sent with status 200."""

    error: str
    category: ErrorCategory


class MetadataResponse(ResponseBody):
    """The result is ready and this large; the client asks again without ``allow_metadata_only``."""

    response_payload_size: int
    status: Literal["complete_metadata"] = "complete_metadata"


class CancelFutureRequest(RequestBody):
    """``POST cancel_future``; samples only."""

    request_id: Identifier


class SamplingSessionTarget(RequestBody):
    """Whose futures a batch poll asks about."""

    sampling_session_id: Identifier
    cloned_sampler_id: Annotated[int, Field(ge=0, le=MAX_INT32)] = 0
    type: Literal["sampling_session"] = "sampling_session"


class RetrieveFuturesRequest(RequestBody):
    """``POST retrieve_futures``; a timeout of 0 only acknowledges."""

    target: SamplingSessionTarget
    prev_cursor: SeqId = 0
    timeout: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: Annotated[tuple[Identifier, ...], Field(fail_fast=True)] = ()


class FinishedCompletion(ResponseBody):
    """A future that has a result."""

    request_id: str
    response_payload_uncompressed_size: int | None = None
    state: Literal["finished"] = "finished"


class FailedCompletion(ResponseBody):
    """A future that has an error."""

    request_id: str
    state: Literal["failed"] = "failed"


Completion: TypeAlias = Annotated[FinishedCompletion | FailedCompletion, Field(discriminator="state")]


class RetrieveFuturesResponse(ResponseBody):
    """What ended after ``prev_cursor``."""

    completions: list[Completion]
    cursor: int
