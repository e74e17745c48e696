"""Bodies of our own routes, which the official protocol has no words for: many futures at once, a run's next number."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import ConfigDict, Field

from twinkle.core.operation import OperationKind, OperationState
from twinkle.core.standing import WaitReason
from twinkle.wire.bodies.base import Identifier, RequestBody, ResponseBody
from twinkle.wire.bodies.futures import ErrorCategory

MAX_COLLECTED_FUTURES = 500

CollectedState: TypeAlias = Literal["done", "failed", "expired", "unknown"]


class CollectRequest(RequestBody):
    """``POST futures/collect``: held until one of these ends, at most ``timeout_s`` and the server's own limit."""

    request_ids: tuple[Identifier, ...] = Field(min_length=1, max_length=MAX_COLLECTED_FUTURES, fail_fast=True)
    timeout_s: float = Field(default=30.0, ge=1, allow_inf_nan=False)


class CollectedFuture(ResponseBody):
    """A future that has ended: its result's bytes, or where it failed the reason.

    A ``done`` one without a ``result`` is too large to come along; ``retrieve_future`` gives it. ``unknown`` says that
    there is no such future, or that it is not the caller's.
    """

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    request_id: str
    state: CollectedState
    kind: OperationKind | None = None
    result: bytes | None = None
    error: str | None = None
    category: ErrorCategory | None = None
    code: str | None = None


class CollectResponse(ResponseBody):
    """What has ended, in no order; empty when the time was up."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    ended: list[CollectedFuture]


class CancelledSamplesResponse(ResponseBody):
    """``POST sessions/{session_id}/cancel_samples``: how many had not ended."""

    num_cancelled: int


class PlaceInLine(ResponseBody):
    """How many operations are before one; a lower bound where it is not exact."""

    num_before: int
    num_own_before: int
    num_tokens_before: int
    is_exact: bool


class StandingResponse(ResponseBody):
    """``GET futures/{request_id}``: where an operation stands. Times are Unix seconds."""

    request_id: str
    kind: OperationKind
    state: OperationState
    mesh: str
    model_id: str
    seq_id: int
    reason: WaitReason
    text: str
    waits_for_seq: int | None = None
    place: PlaceInLine | None = None
    starts_in_s: float | None = None
    attempt: int
    max_attempts: int
    last_error: str | None = None
    next_try_at: float | None = None
    accepted_at: float


class TenantInLine(ResponseBody):
    """One tenant's line on a mesh."""

    tenant: str
    weight: float
    num_adapters_waiting: int
    num_operations: int
    num_samples: int
    num_running: int
    tokens_waiting: int
    share: float
    paused_for_s: float


class MeshQueueResponse(ResponseBody):
    """``GET meshes/{mesh}/queue``, for administrators."""

    mesh: str
    training_tokens_per_s: float | None = None
    sampling_tokens_per_s: float | None = None
    is_exact: bool
    tenants: list[TenantInLine]


class RunResponse(ResponseBody):
    """``GET runs/{run_id}``: what a client must know to go on with a run that another one began."""

    run_id: str
    session_id: str
    base_model: str
    rank: int
    next_seq: int
    """The number after the highest one that was accepted."""
