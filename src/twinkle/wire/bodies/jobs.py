"""Bodies of native jobs: the envelope that every kind shares, how a job stands, and what happened in it.

The envelope's ``spec`` is judged by its kind (:mod:`twinkle.wire.bodies.jobs_specs`). Times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from twinkle.wire.bodies.base import Identifier, Metadata, Name, ResponseBody
from twinkle.wire.bodies.jobs_base import JobPart, Priority
from twinkle.wire.bodies.jobs_specs import SPECS

MAX_JOBS_AT_ONCE = 1000
MAX_DEPENDENCIES = 100
MAX_EVENTS = 1000
MAX_EVENT_WAIT_S = 30.0
DEFAULT_MAX_ATTEMPTS = 3

_CLIENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def _client_id(text: str) -> str:
    if not _CLIENT_ID.fullmatch(text):
        raise ValueError("must be 1 to 128 letters, digits, '.', '_', ':' or '-', and begin with a letter or a digit")
    return text


def _web_address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return text


def _plain_dependency(value: object) -> object:
    return {"job": value} if isinstance(value, str) else value


ClientId = Annotated[str, AfterValidator(_client_id)]
WebAddress = Annotated[str, Field(max_length=2048), AfterValidator(_web_address)]


class AfterJob(JobPart):
    """A job that must have ended first; with ``ok`` it must have succeeded, else this one is cancelled."""

    job: Identifier
    """Its id, or the ``client_id`` of one of the same request."""
    condition: Literal["ok", "any"] = "ok"


Dependency = Annotated[AfterJob, BeforeValidator(_plain_dependency, json_schema_input_type=AfterJob | str)]


class JobRequest(JobPart):
    """``POST jobs``: what is to be done, and how the job is to be run."""

    kind: Identifier
    spec: dict[str, Any]
    """Of this kind: ``GET jobs/schema`` has them all."""
    client_id: ClientId | None = None
    """A name of the client's own choice: the same one with the same body is the same job, however often it is sent."""
    name: Name | None = None
    after: tuple[Dependency, ...] = Field(default=(), max_length=MAX_DEPENDENCIES)
    priority: Priority | None = None
    """Without one the job goes behind the tenant's interactive work."""
    max_attempts: int = Field(default=DEFAULT_MAX_ATTEMPTS, ge=1, le=100)
    notify_url: WebAddress | None = None
    """Told, with a signature, when the job begins, is tried again and ends."""
    metadata: Metadata = Field(default={})
    dry_run: bool = False
    """Do nothing but say what it would take."""


class JobsRequest(JobPart):
    """``POST jobs/many``: all of them, or where one is refused none."""

    jobs: tuple[JobRequest, ...] = Field(min_length=1, max_length=MAX_JOBS_AT_ONCE, fail_fast=True)

    @model_validator(mode="after")
    def _one_client_id_each(self) -> Self:
        seen: set[str] = set()
        for place, job in enumerate(self.jobs):
            if job.client_id is not None and job.client_id in seen:
                raise ValueError(f"jobs[{place}] has the client_id of another one of this request: {job.client_id}")
            seen |= {job.client_id} if job.client_id is not None else set()
        return self


class JobFailureInfo(ResponseBody):
    """Why a job failed, or why its last attempt did."""

    code: str
    message: str
    is_transient: bool
    field: str | None = None
    details: dict[str, Any] = Field(default={})
    """More of it, such as the first errors of a file under ``errors``."""


class JobStanding(ResponseBody):
    """A job without its spec, as lists have it."""

    id: str
    kind: str
    state: str
    """``waiting``, ``queued``, ``running``, ``paused`` or ``retrying``; in the end ``succeeded``, ``failed`` or
    ``cancelled``."""
    is_final: bool
    name: str | None = None
    client_id: str | None = None
    parent: str | None = None
    phase: str | None = None
    progress: dict[str, Any] = Field(default={})
    """``done`` of ``total`` in ``unit``, and what the kind adds, like ``loss`` and ``tokens_per_s``."""
    result: dict[str, Any] | None = None
    failure: JobFailureInfo | None = None
    attempt: int
    max_attempts: int
    next_try_at: float | None = None
    """Of one that is ``retrying``."""
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None


class JobAttemptInfo(ResponseBody):
    """One attempt at a job; ``outcome`` is ``succeeded``, ``failed``, ``lost`` or ``cancelled`` when it has ended."""

    attempt: int
    started_at: float
    ended_at: float | None = None
    outcome: str | None = None
    reason: str | None = None


class JobWaitInfo(ResponseBody):
    """Why a job does not run yet; places are those of now, were nothing to arrive any more."""

    reason: str
    """``dependency``, ``at_once``, ``max_running_jobs``, ``paused``, ``retry_backoff`` or ``position``."""
    waits_for: str | None = None
    """The first job that it needs, of a ``dependency``."""
    until: float | None = None
    """When it is ready again, of a ``retry_backoff``."""
    num_before: int | None = None
    """How many jobs begin before it, of a ``position``."""
    num_own_before: int | None = None
    """How many of them are its tenant's."""
    is_exact: bool = True
    """False: so many are before it at least; no more are counted, and its end is not told."""


class JobResponse(JobStanding):
    """``GET jobs/{job_id}``, and the answer to everything that is done to one."""

    spec: dict[str, Any]
    priority: int
    notify_url: str | None = None
    metadata: dict[str, str] = Field(default={})
    cancel_requested: bool = False
    pause_requested: bool = False
    attempts: list[JobAttemptInfo] = Field(default=[])
    waits: JobWaitInfo | None = None
    """Missing while it runs, and when it has ended."""
    ends_at: float | None = None
    """When it may have ended, by what jobs of its kind took lately."""


class JobsResponse(ResponseBody):
    """``GET jobs``: a page, newest first; ``cursor`` gives the next one and is missing on the last."""

    jobs: list[JobStanding]
    cursor: str | None = None


class CreatedJobsResponse(ResponseBody):
    """``POST jobs/many``, in the order of the request."""

    jobs: list[JobStanding]


class JobEventInfo(ResponseBody):
    """Something that happened in a job; ``number`` counts up within it."""

    number: int
    time: float
    kind: str
    """``status``, ``message``, ``metrics``, ``sample``, ``checkpoint`` or ``attempt``."""
    message: str
    data: dict[str, Any] = Field(default={})


class JobEventsResponse(ResponseBody):
    """``GET jobs/{job_id}/events``: what happened after a number, oldest first, and how the job stands by then."""

    events: list[JobEventInfo]
    job: JobStanding


def published_schema() -> Mapping[str, Any]:
    """The JSON schema of a job's request, its ``spec`` by its ``kind``."""
    schema = JobRequest.model_json_schema(mode="validation", ref_template="#/$defs/{model}")
    definitions = schema.setdefault("$defs", {})
    choices = []
    for kind, spec_class in sorted(SPECS.items()):
        spec = spec_class.model_json_schema(mode="validation", ref_template="#/$defs/{model}")
        definitions |= spec.pop("$defs", {})
        definitions[spec_class.__name__] = spec
        of_kind = {"properties": {"kind": {"const": kind}}}
        choices.append({"if": of_kind, "then": {"properties": {"spec": {"$ref": f"#/$defs/{spec_class.__name__}"}}}})
    schema["properties"]["kind"]["enum"] = sorted(SPECS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "allOf": choices}
