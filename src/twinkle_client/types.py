"""What a server of the Twinkle dialect says of itself, of runs and of checkpoints."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    # A server may say more than is known here.
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class CapacityInfoResponse(_Answer):
    """How many adapters the models have room for."""

    max_loras: int = 0
    used_loras: int = 0
    free_loras: int = 0


class SupportedModel(_Answer):
    """A base model that is served."""

    model_name: str


class ServerCapabilities(_Answer):
    """What is served."""

    supported_models: list[SupportedModel] = []


class Cursor(_Answer):
    """Which part of a list this is."""

    limit: int
    offset: int
    total_count: int


class TrainingRun(_Answer):
    """An adapter that was trained, and what is left of it."""

    training_run_id: str
    base_model: str
    model_owner: str = ""
    save_dir: str | None = None
    is_lora: bool = True
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime | None = None
    last_checkpoint: dict[str, Any] | None = None
    last_sampler_checkpoint: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class Checkpoint(_Answer):
    """One checkpoint of a run; its id is ``weights/<name>`` or ``sampler_weights/<name>``."""

    checkpoint_id: str
    checkpoint_type: str
    time: datetime
    size_bytes: int = 0
    public: bool = False
    twinkle_path: str
    base_model: str | None = None
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRunsResponse(_Answer):
    """Runs, and which part of all of them these are."""

    training_runs: list[TrainingRun]
    cursor: Cursor


class CheckpointsResponse(_Answer):
    """The checkpoints of a run."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class DeleteCheckpointResponse(_Answer):
    """Whether a checkpoint was deleted."""

    success: bool
    message: str = ""


class WeightsInfoResponse(_Answer):
    """What a checkpoint holds."""

    training_run_id: str = ""
    base_model: str
    model_owner: str = ""
    is_lora: bool = True
    lora_rank: int | None = None


class ParsedCheckpointTwinklePath(_Answer):
    """Where a checkpoint is: by the server's own name, and as clients name it."""

    path: str
    twinkle_path: str


class Push(_Answer):
    """That each new checkpoint of a run, or of all, is pushed; an upload is a job like others."""

    push_id: str
    run_id: str | None = None
    to: str
    private: bool
    created_at: datetime
    last_job: str | None = None


class PushesResponse(_Answer):
    """What is pushed by itself."""

    pushes: list[Push]


class LoraConfig(_Answer):
    """An adapter as the service describes it; a model's own config is ``peft.LoraConfig``."""

    rank: int = 8
    train_unembed: bool = False
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(_Answer):
    """What is asked for when a run is made."""

    base_model: str
    lora_config: LoraConfig | None = None
    save_dir: str | None = None
    user_metadata: dict[str, Any] | None = None


class UploadStatus(_Answer):
    """How far a checkpoint is on its way to a hub: ``pending``, ``running``, ``completed`` or ``failed``."""

    request_id: str
    status: str
    error: str | None = None
