"""What a flow is asked for: jobs by name, and which of them waits for which others."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from twinkle.core.names import plain_name
from twinkle.wire.bodies.base import Identifier, Metadata
from twinkle.wire.bodies.jobs_base import JobPart, JobSpec

MAX_FLOW_JOBS = 100

FlowName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""What a job is called within its flow: it may stand in ``${name.result.checkpoint}``."""


class Condition(StrEnum):
    """How the job that is waited for has to end."""

    OK = "ok"
    """Well; otherwise the one that waits is cancelled with the reason ``dependency``."""
    ANY = "any"
    """However."""


class FlowJob(JobPart):
    """One job of a flow. Its spec may hold ``${name.result.field}``, which makes it wait for that job to end well."""

    kind: Identifier
    spec: dict[str, Any]
    after: dict[FlowName, Annotated[Condition, Field(strict=False)]] = Field(default={})


class FlowSpec(JobSpec):
    """Kind ``flow``: all its jobs are made in one transaction when it is submitted, those that wait included."""

    jobs: Annotated[dict[FlowName, FlowJob], Field(min_length=1, max_length=MAX_FLOW_JOBS)]


class FlowFile(JobPart):
    """A flow as a YAML file says it: the jobs, and what any submission may say of itself."""

    id: Identifier | None = None
    """Chosen by the client: the same id with the same flow is the same flow, with another one it is refused."""
    name: Annotated[Identifier, AfterValidator(plain_name)] | None = None
    metadata: Metadata | None = None
    notify_url: Identifier | None = None
    jobs: Annotated[dict[FlowName, FlowJob], Field(min_length=1, max_length=MAX_FLOW_JOBS)]
