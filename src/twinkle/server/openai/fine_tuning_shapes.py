"""Jobs as OpenAI's fine-tuning routes show them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from twinkle.core.job import Job, JobEvent, JobFailure, JobKind, JobState, JsonObject
from twinkle.server.fine_tuned import known_name, name_of
from twinkle.server.openai.fine_tuning_bodies import FIELDS
from twinkle.wire.bodies.jobs_training import DEFAULT_LR

Status: TypeAlias = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]

PREPARING = "preparing the data"
_STATUS: dict[JobState, Status] = {
    JobState.WAITING: "queued",
    JobState.QUEUED: "queued",
    JobState.RUNNING: "running",
    JobState.PAUSED: "paused",
    JobState.RETRYING: "queued",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
METHOD_OF: dict[JobKind, str] = {
    JobKind.SUPERVISED: "supervised",
    JobKind.PREFERENCE: "dpo",
    JobKind.REINFORCEMENT: "reinforcement",
}
_TOLD_OF_CHECKPOINTS = ("step", "loss", "eval_loss", "eval_accuracy")
_CODES = {"data": "invalid_training_file", "eval_data": "invalid_validation_file"}


class FineTuningError(TypedDict):
    """Why a job failed, and by which parameter. ``errors`` are all that is wrong with its data, by line."""

    code: str
    message: str
    param: str | None
    errors: list[dict[str, Any]]


class FineTuningJob(TypedDict):
    """One job."""

    object: Literal["fine_tuning.job"]
    id: str
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: Status
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    seed: int
    metadata: dict[str, str]
    integrations: list[Any]
    error: FineTuningError | None


class FineTuningEvent(TypedDict):
    """Something that happened in a job."""

    object: Literal["fine_tuning.job.event"]
    id: str
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class FineTuningCheckpoint(TypedDict):
    """A checkpoint that is still there, by a name to sample from."""

    object: Literal["fine_tuning.job.checkpoint"]
    id: str
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: dict[str, float]


class FineTuningJobs(TypedDict):
    """A page of jobs, newest first."""

    object: Literal["list"]
    data: list[FineTuningJob]
    has_more: bool


class FineTuningEvents(TypedDict):
    """A page of a job's events, newest first."""

    object: Literal["list"]
    data: list[FineTuningEvent]
    has_more: bool


class FineTuningCheckpoints(TypedDict):
    """A page of a job's checkpoints, newest first."""

    object: Literal["list"]
    data: list[FineTuningCheckpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


def show(job: Job, *, ends_at: float | None = None) -> FineTuningJob:
    """A job in OpenAI's shape; ``ends_at`` is when it may have ended, where that is known."""
    result, spec = job.result or {}, job.spec
    succeeded = job.state is JobState.SUCCEEDED
    hyperparameters = _hyperparameters(job)
    method = METHOD_OF[job.kind]
    return FineTuningJob(
        object="fine_tuning.job",
        id=job.id,
        created_at=int(job.created_at),
        finished_at=None if job.finished_at is None else int(job.finished_at),
        estimated_finish=None if ends_at is None else int(ends_at),
        model=str(spec["model"]),
        fine_tuned_model=name_of(job),
        organization_id=job.tenant,
        status="validating_files" if _is_validating(job) else _STATUS[job.state],
        training_file=str(spec.get("data", "")),
        validation_file=spec.get("eval_data"),
        result_files=[result["metrics_file"]] if succeeded and "metrics_file" in result else [],
        trained_tokens=result.get("trained_tokens") if job.state.is_final else None,
        hyperparameters=hyperparameters,
        method={"type": method, method: {"hyperparameters": hyperparameters, **_grader(job)}},
        seed=int(spec.get("seed", job.seed)),
        metadata=job.metadata,
        integrations=[],
        error=None if job.failure is None or not job.state.is_final else _error(job.failure),
    )


def show_event(job: Job, event: JobEvent) -> FineTuningEvent:
    """An event in OpenAI's shape."""
    is_metrics = event.kind == "metrics"
    failed = event.kind in ("status", "attempt") and "failed" in event.message
    return FineTuningEvent(
        object="fine_tuning.job.event",
        id=event_id(job, event.number),
        created_at=int(event.at),
        level="error" if failed else "info",
        message=event.message,
        type="metrics" if is_metrics else "message",
        data=_metrics(event.data) if is_metrics else event.data,
    )


def show_checkpoint(job: Job, event: JobEvent) -> FineTuningCheckpoint:
    """A checkpoint in OpenAI's shape; ``event`` said that it was saved."""
    data = event.data
    return FineTuningCheckpoint(
        object="fine_tuning.job.checkpoint",
        id=f"ftckpt-{job.id}-{data['step']}",
        created_at=int(event.at),
        fine_tuned_model_checkpoint=str(known_name(job, step=data["step"])),
        fine_tuning_job_id=job.id,
        step_number=data["step"],
        metrics=_metrics({name: data[name] for name in _TOLD_OF_CHECKPOINTS if data.get(name) is not None}),
    )


def event_id(job: Job, number: int) -> str:
    """How an event is called."""
    return f"ftevent-{job.id}-{number}"


def _is_validating(job: Job) -> bool:
    return job.state is JobState.RUNNING and job.phase in (None, PREPARING)


def _hyperparameters(job: Job) -> dict[str, Any]:
    """What was asked for, or, where that was ``auto``, what it came to."""
    known = {**job.spec, **{name: value for name, value in job.progress.items() if value is not None}}
    lr = known.get("lr", "auto")
    told = {
        "n_epochs": known.get("epochs", "auto"),
        "batch_size": known.get("batch_size", "auto"),
        "learning_rate_multiplier": lr if lr == "auto" else lr / DEFAULT_LR,
    }
    beta = job.spec.get("loss_config", {}).get("beta", "auto")
    if job.kind is JobKind.REINFORCEMENT:
        more = {"eval_interval": job.spec.get("eval_every"), "eval_samples": job.spec.get("eval_answers")}
        return {**told, **{name: "auto" if value is None else value for name, value in more.items()}}
    return {**told, "beta": beta} if job.kind is JobKind.PREFERENCE else told


def _grader(job: Job) -> JsonObject:
    return {"grader": job.spec["grader"]} if job.kind is JobKind.REINFORCEMENT else {}


def _metrics(data: JsonObject) -> dict[str, Any]:
    """A step's metrics, those that OpenAI has a name for under that."""
    names = {"loss": "train_loss", "eval_loss": "valid_loss", "eval_accuracy": "valid_mean_token_accuracy"}
    return {names.get(name, name): value for name, value in data.items()}


def _error(failure: JobFailure) -> FineTuningError:
    field = failure.field
    code = _CODES.get(field or "", failure.code) if failure.code == "invalid_data" else failure.code
    return FineTuningError(
        code=code,
        message=failure.message,
        param=None if field is None else FIELDS.get(field, field),
        errors=list(failure.details.get("errors", [])),
    )
