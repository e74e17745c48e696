"""What a job begins with: a base model, or a checkpoint and what is known of that."""

from __future__ import annotations

from typing import Any

from twinkle.core.job import JobFailed
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import AdapterShape
from twinkle.wire.bodies.checkpoints import WeightsInfoResponse
from twinkle.wire.bodies.jobs_ops import OpsSpec
from twinkle.wire.bodies.jobs_training import DEFAULT_RANK, TrainingSpec
from twinkle.wire.paths import SCHEME


async def shape_of(context: JobContext[Any]) -> AdapterShape:
    """Of the adapter that a job's spec asks for; of a checkpoint the one that it was trained with."""
    spec: TrainingSpec | OpsSpec = context.spec
    if not spec.model.startswith(SCHEME):
        parts = (spec.train_attn, spec.train_mlp, spec.train_unembed)
        return AdapterShape(spec.rank or DEFAULT_RANK, *(part is not False for part in parts))
    told = await _weights_info(context, spec.model, field="model")
    parts = (told.train_attn, told.train_mlp, told.train_unembed)
    return AdapterShape(told.lora_rank or DEFAULT_RANK, *(part is not False for part in parts))


async def base_model_of(context: JobContext[Any], model: str, *, field: str = "model") -> str:
    """The base model, of a checkpoint the one that it was trained on.

    Raises:
        JobFailed: There is no such checkpoint, or it is somebody else's.
    """
    if not model.startswith(SCHEME):
        return model
    return (await _weights_info(context, model, field=field)).base_model


async def _weights_info(context: JobContext[Any], path: str, *, field: str) -> WeightsInfoResponse:
    answer = await context.door.request("POST", "/api/v1/weights_info", json={"tinker_path": path})
    if not answer.is_success:
        is_transient = answer.status_code >= 500
        detail = answer.json()["detail"]
        raise JobFailed("model_not_found", f"{path}: {detail}", field=field, is_transient=is_transient)
    return WeightsInfoResponse.model_validate_json(answer.content)
