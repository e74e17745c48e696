"""Bodies of the REST half: training runs, checkpoints, samplers' origins, copies."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from twinkle.core.names import plain_name
from twinkle.wire.bodies.base import Identifier, PathText, RequestBody, ResponseBody, SeqId, Text, TtlSeconds
from twinkle.wire.bodies.training import OptimizerConfigInfo

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]


class Cursor(ResponseBody):
    """Where a page lies in its list."""

    offset: int
    limit: int
    total_count: int


class CheckpointInfo(ResponseBody):
    """A checkpoint as its owner sees it; ``checkpoint_id`` is ``<segment>/<name>``."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class CheckpointsResponse(ResponseBody):
    """``GET checkpoints`` and ``GET training_runs/{run}/checkpoints``."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class TrainingRun(ResponseBody):
    """``GET training_runs/{run}``."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = None
    last_checkpoint: CheckpointInfo | None = None
    last_sampler_checkpoint: CheckpointInfo | None = None
    user_metadata: dict[str, str] | None = None


class TrainingRunsResponse(ResponseBody):
    """``GET training_runs``."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtlRequest(RequestBody):
    """``PUT .../ttl``; null means for ever."""

    ttl_seconds: TtlSeconds | None


class ExternalWeightsUrlsResponse(ResponseBody):
    """Signed URLs by the file's path within the checkpoint."""

    urls: dict[str, str]
    expires: datetime


class WeightsInfoRequest(RequestBody):
    """``POST weights_info``."""

    tinker_path: PathText


class WeightsInfoResponse(ResponseBody):
    """What a client must know to load a checkpoint."""

    base_model: str
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    optimizer_config: OptimizerConfigInfo = OptimizerConfigInfo()


class CopyWeightsRequest(RequestBody):
    """``POST copy_weights``: into a project, or into a model slot of a session."""

    source_path: PathText
    destination_project_id: Annotated[Identifier, AfterValidator(plain_name)] | None = None
    session_id: Identifier | None = None
    model_seq_id: SeqId | None = None
    ttl_seconds: TtlSeconds | None = None
    weights_access_token: Text | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _one_destination(self) -> Self:
        if (self.session_id is None) != (self.model_seq_id is None):
            raise ValueError("session_id and model_seq_id belong together")
        if (self.destination_project_id is None) == (self.session_id is None):
            raise ValueError("needs either destination_project_id, or session_id and model_seq_id")
        return self


class CopyWeightsResponse(ResponseBody):
    """Where the copy lies."""

    tinker_path: str
