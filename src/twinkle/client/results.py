"""Results as they arrive, and what they become: by the kind of operation."""

from __future__ import annotations

from typing import TypeAlias

from twinkle.client.errors import Cancelled, Expired, NotFound, OperationFailed, TwinkleError
from twinkle.core.operation import OperationKind
from twinkle.wire.bodies.losses import CreateCustomLossResponse
from twinkle.wire.bodies.native import CollectedFuture
from twinkle.wire.bodies.runs import BranchResponse
from twinkle.wire.bodies.training import (
    CreateModelResponse,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from twinkle.wire.sample_result import SampleResult, decode_sample_response
from twinkle.wire.training_result import ForwardBackwardResult, decode_forward_backward_output

Result: TypeAlias = (
    ForwardBackwardResult
    | SampleResult
    | CreateModelResponse
    | OptimStepResponse
    | SaveWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | LoadWeightsResponse
    | BranchResponse
    | UnloadModelResponse
    | CreateCustomLossResponse
)


def decode_result(kind: OperationKind, raw: bytes) -> Result:
    """Reads a result's bytes.

    Raises:
        ValueError: They are not what this kind of operation gives.
        InvalidInput: They are not the protobuf message that this kind gives.
    """
    match kind:
        case OperationKind.FORWARD | OperationKind.FORWARD_BACKWARD:
            return decode_forward_backward_output(raw)
        case OperationKind.SAMPLE:
            return decode_sample_response(raw)
        case OperationKind.CREATE_MODEL:
            return CreateModelResponse.model_validate_json(raw)
        case OperationKind.OPTIM_STEP:
            return OptimStepResponse.model_validate_json(raw)
        case OperationKind.SAVE_WEIGHTS:
            return SaveWeightsResponse.model_validate_json(raw)
        case OperationKind.SAVE_WEIGHTS_FOR_SAMPLER:
            return SaveWeightsForSamplerResponse.model_validate_json(raw)
        case OperationKind.SAVE_WEIGHTS_EXTERNAL:
            return SaveWeightsExternalResponse.model_validate_json(raw)
        case OperationKind.LOAD_WEIGHTS:
            return LoadWeightsResponse.model_validate_json(raw)
        case OperationKind.UNLOAD_MODEL:
            return UnloadModelResponse.model_validate_json(raw)
        case OperationKind.FORK | OperationKind.REWIND:
            return BranchResponse.model_validate_json(raw)
        case OperationKind.CREATE_CUSTOM_LOSS:
            return CreateCustomLossResponse.model_validate_json(raw)
    raise ValueError(f"an operation of kind {kind} has no result")


def error_of(ended: CollectedFuture) -> TwinkleError | None:
    """Why there is no result, or ``None`` when there is one."""
    match ended.state:
        case "done":
            return None
        case "unknown":
            return NotFound(f"no future {ended.request_id!r}")
        case "expired":
            return Expired(f"the result of {ended.request_id} was kept for its time and is gone")
        case "failed":
            message, code = ended.error or "failed without a reason", ended.code or "unknown"
            if code == Cancelled.code:
                return Cancelled(f"{ended.request_id}: {message}")
            return OperationFailed(
                message, request_id=ended.request_id, code=code, category=ended.category or "unknown"
            )
