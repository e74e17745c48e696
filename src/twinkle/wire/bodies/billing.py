"""Bodies of usage: what was trained, sampled and stored, hour by hour. Nothing has a price here."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from twinkle.wire.bodies.base import ResponseBody


class TrainingUsage(ResponseBody):
    """Tokens of forward and backward passes."""

    token_count: int
    type: Literal["training"] = "training"


class PrefillUsage(ResponseBody):
    """Tokens of prompts."""

    token_count: int
    cached: bool = False
    type: Literal["sampling_prefill"] = "sampling_prefill"


class SamplingUsage(ResponseBody):
    """Tokens drawn."""

    token_count: int
    type: Literal["sampling_sample"] = "sampling_sample"


class CheckpointUsage(ResponseBody):
    """Checkpoints written."""

    count: int
    type: Literal["checkpoint"] = "checkpoint"


class StorageUsage(ResponseBody):
    """What checkpoints took up, for how long."""

    gigabyte_hours: float
    free: bool = False
    type: Literal["storage"] = "storage"


UsageInfo: TypeAlias = Annotated[
    TrainingUsage | PrefillUsage | SamplingUsage | CheckpointUsage | StorageUsage, Field(discriminator="type")
]


class UsageEvent(ResponseBody):
    """One kind of use in one hour of one session. ``device_seconds`` is ours; the SDK passes over it."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    device_seconds: float | None = None
    event_info: UsageInfo


class UsageSession(ResponseBody):
    """What the owner of a session said about it."""

    user_metadata: dict[str, str] | None = None


class UsageResponse(ResponseBody):
    """``GET billing/usage/events``."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]


class StoredItem(ResponseBody):
    """What a project's checkpoints take up now."""

    project_id: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StoredResponse(ResponseBody):
    """``GET billing/usage/checkpoints/current``."""

    data: list[StoredItem]
