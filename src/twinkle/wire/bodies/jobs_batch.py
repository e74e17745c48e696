"""What a batch of samples is asked for: a file of requests, and which route answers them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from twinkle.wire.bodies.base import MAX_INT32, Identifier
from twinkle.wire.bodies.jobs_base import FileId, JobSpec

BatchEndpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
MIN_OUTPUT_S = 3600
MAX_OUTPUT_S = 30 * 24 * 3600


class BatchSpec(JobSpec):
    """A file of requests, each answered as the OpenAI-compatible route would answer it."""

    data: FileId
    """JSON lines in the form of OpenAI's batches: ``custom_id``, ``method``, ``url`` and ``body``."""
    endpoint: BatchEndpoint = "/v1/chat/completions"
    """Where every line goes."""
    model: Identifier | None = None
    """Of lines whose ``body`` names none."""
    window: int = Field(default=64, ge=1, le=1024)
    """Samples that are under way at once, at most; the tenant's limit may allow fewer."""
    seed: int | None = Field(default=None, ge=0, le=MAX_INT32)
    """What lines without a seed draw theirs from; without one each batch has its own."""
    output_expires_after_s: int | None = Field(default=None, ge=MIN_OUTPUT_S, le=MAX_OUTPUT_S)
    """How long the files of answers and errors are kept; without it, until they are deleted."""
