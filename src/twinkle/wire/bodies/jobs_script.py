"""What a job of a tenant's own code is asked for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from twinkle.wire.bodies.base import Text
from twinkle.wire.bodies.jobs_base import FileId, JobSpec

MAX_ARGUMENTS = 256
MAX_SCRIPT_BYTES = 2**20


class ScriptSpec(JobSpec):
    """A Python script that runs beside the service, as an operator has allowed it."""

    data: FileId
    """The script."""
    arguments: tuple[Text, ...] = Field(default=(), max_length=MAX_ARGUMENTS)
    """What comes after its name on its command line."""
    max_seconds: Annotated[int, Field(ge=1)] | None = None
    """Of one attempt; the operator's limit holds in any case."""

    @field_validator("dry_run")
    @classmethod
    def _is_for_real(cls, dry_run: bool) -> bool:
        if dry_run:
            raise ValueError("is not for scripts: nobody knows what one takes before it has run")
        return dry_run
