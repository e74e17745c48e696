"""Bodies of the Twinkle dialect's gateway: presence, capacity, training runs and checkpoints."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from twinkle.wire.bodies.base import Identifier, Metadata, PathText, RequestBody, ResponseBody
from twinkle.wire.bodies.checkpoints import Cursor
from twinkle.wire.bodies.session import SupportedModel


class TwinkleBody(ResponseBody):
    """Base of what is answered in this dialect, whose clients want nulls written."""

    def to_json(self) -> bytes:
        """Writes the body with its nulls."""
        return self.model_dump_json().encode()


class OpenSessionRequest(RequestBody):
    """``POST twinkle/create_session``."""

    metadata: Metadata | None = None


class OpenSessionResponse(TwinkleBody):
    """The new session's id, which clients send in ``X-Twinkle-Session-Id``, and what upstream's server does not do.

    ``idempotency``: a call that is sent again under its ``x-idempotency-key`` is the same call. ``futures``: with
    ``Prefer: respond-async`` it is answered with a ticket.
    """

    session_id: str
    offers: tuple[Literal["idempotency", "futures"], ...] = ("idempotency", "futures")


class HeartbeatRequest(RequestBody):
    """``POST twinkle/session_heartbeat``."""

    session_id: Identifier


class HeartbeatResponse(TwinkleBody):
    """Nothing: it was heard."""


class CapacityResponse(TwinkleBody):
    """Adapters that lie ready on the devices of live meshes; those beyond wait parked, and none is refused."""

    max_loras: int
    used_loras: int
    free_loras: int


class ServedModelsResponse(TwinkleBody):
    """``GET twinkle/get_server_capabilities``."""

    supported_models: list[SupportedModel]


class ModelHealth(TwinkleBody):
    """Whether a base model has a live mesh, also as a status."""

    healthy: bool
    status_code: Literal[200, 503]


class DeepHealthResponse(TwinkleBody):
    """``GET twinkle/healthz/deep``."""

    healthy: bool
    models: dict[str, ModelHealth]


class ResourceCounts(TwinkleBody):
    """The caller's own: live sessions, adapters, places to sample from, operations that have not ended."""

    sessions: int
    models: int
    sampling_sessions: int
    futures: int


class CleanupStatus(TwinkleBody):
    """Whether what has had its time is cleared away, and how long results are kept (seconds)."""

    running: bool
    expiration_timeout: float


class StatusResponse(TwinkleBody):
    """``GET twinkle/status``."""

    resources: ResourceCounts
    cleanup: CleanupStatus


class RunCheckpoint(TwinkleBody):
    """A checkpoint as this dialect shows it; ``checkpoint_id`` is ``<segment>/<name>``."""

    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler"]
    time: datetime
    size_bytes: int
    public: bool
    twinkle_path: str
    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    user_metadata: dict[str, str] | None


class RunInfo(TwinkleBody):
    """``GET twinkle/training_runs/{run}``. No path of the server's is told: ``save_dir`` is always null."""

    training_run_id: str
    base_model: str
    model_owner: str
    save_dir: None = None
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: RunCheckpoint | None
    last_sampler_checkpoint: RunCheckpoint | None
    user_metadata: dict[str, str] | None


class RunsResponse(TwinkleBody):
    """``GET twinkle/training_runs``."""

    training_runs: list[RunInfo]
    cursor: Cursor


class RunCheckpointsResponse(TwinkleBody):
    """``GET twinkle/training_runs/{run}/checkpoints``."""

    checkpoints: list[RunCheckpoint]
    cursor: Cursor


class DeletedCheckpointResponse(TwinkleBody):
    """``DELETE twinkle/training_runs/{run}/checkpoints/{checkpoint}``."""

    success: Literal[True] = True
    message: str


class PathInfoRequest(RequestBody):
    """``POST twinkle/weights_info``."""

    twinkle_path: PathText


class PathInfoResponse(TwinkleBody):
    """What a path's weights are, and whose."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    lora_rank: int


class CheckpointPathResponse(TwinkleBody):
    """A checkpoint's path; both are the same, since no folder of the server is anybody's to name."""

    path: str
    twinkle_path: str
