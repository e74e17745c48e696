"""Bodies of start-up and presence: client configuration, sessions, heartbeats, telemetry, capabilities."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from twinkle.core.names import plain_name
from twinkle.wire.bodies.base import Identifier, Metadata, Name, RequestBody, ResponseBody, Text

MAX_TAGS_CHARS = 16 * 1024


class ClientConfigRequest(RequestBody):
    """``POST client/config`` and ``client/dynamic_config``."""

    sdk_version: Text = ""


class ClientConfigResponse(ResponseBody):
    """Flags for a client's lifetime; the SDK has a default for each one that is absent."""

    pjwt_auth_enabled: bool | None = None
    parallel_fwdbwd_chunks: bool | None = None
    proto_compress_fwdbwd: bool | None = None
    fwdbwd_max_chunk_len: int | None = None
    fwdbwd_max_chunk_bytes_count: int | None = None
    fwdbwd_dispatch_bytes_semaphore_size: int | None = None
    sample_dispatch_bytes_semaphore_size: int | None = None
    inflight_response_bytes_semaphore_size: int | None = None
    sample_max_concurrent_requests: int | None = None
    sample_no_retries: bool | None = None
    sample_enable_stuck_detection: bool | None = None
    use_pyqwest_transport: bool | None = None
    billing_exception_max_pause_duration_sec: int | None = None
    sample_use_retrieve_futures: bool | None = None
    sample_join_sampling_session: bool | None = None
    custom_loss_server_side: bool | None = None
    # Not for the SDK from 0.25 on, which always does so; older ones then send protobuf.
    proto_write_fwdbwd: bool | None = None
    fwd_via_fwdbwd: bool | None = None
    # Nor for the SDK from 0.38 on; older ones else look a checkpoint up with its access token for an API key.
    create_model_via_load_weights: bool | None = None


class ClientDynamicConfigResponse(ResponseBody):
    """Flags the client asks for again every so often."""

    refresh_interval_sec: int | None = None
    sample_cancel_enabled: bool | None = None
    sample_cancel_max_batch_size: int | None = None


def _few_characters(tags: list[str]) -> list[str]:
    num_chars = sum(map(len, tags))
    if num_chars > MAX_TAGS_CHARS:
        raise ValueError(f"must have at most {MAX_TAGS_CHARS} characters together, not {num_chars}")
    return tags


class CreateSessionRequest(RequestBody):
    """``POST create_session``."""

    tags: Annotated[list[Text], AfterValidator(_few_characters)] = Field(default=[], max_length=1024)
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Name | None = None
    display_name: Name | None = None


class CreateSessionResponse(ResponseBody):
    """The session's id; the client prints the messages to its user."""

    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    type: Literal["create_session"] = "create_session"


class SessionHeartbeatRequest(RequestBody):
    """``POST session_heartbeat``, every ten seconds."""

    session_id: Identifier


class SessionHeartbeatResponse(ResponseBody):
    """The session is still known."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(RequestBody):
    """How a client's session ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(RequestBody):
    """``POST sessions/{id}/finish``."""

    reason: FinishReason
    detail: Text | None = None


class SessionProjectRequest(RequestBody):
    """``PUT sessions/{id}/project``."""

    project_id: Annotated[Identifier, AfterValidator(plain_name)]


class TelemetryRequest(RequestBody):
    """``POST telemetry``; the events themselves are not looked at."""

    session_id: Text = ""
    events: list[object] = Field(default=[])


class TelemetryResponse(ResponseBody):
    """The events were taken."""

    status: Literal["accepted"] = "accepted"


class SupportedModel(ResponseBody):
    """A base model this server holds."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


class CapabilitiesResponse(ResponseBody):
    """``GET get_server_capabilities``."""

    supported_models: list[SupportedModel]


class SessionResponse(ResponseBody):
    """``GET sessions/{id}``."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class SessionsResponse(ResponseBody):
    """``GET sessions``."""

    sessions: list[str]


class TraceExportResponse(ResponseBody):
    """``GET sessions/{id}/trace_export``. A trace is made while it is read, so it is always ready."""

    status: Literal["ready"] = "ready"
    url: str
