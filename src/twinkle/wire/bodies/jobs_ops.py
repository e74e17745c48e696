"""Jobs of raw operations: what to do with a file of them, and what one line of it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinkle.wire.bodies.base import MAX_INT32, Identifier, Text
from twinkle.wire.bodies.jobs_base import FileId, JobPart, JobSpec
from twinkle.wire.bodies.training import LoraConfig

OperationName = Literal[
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "sample",
]


class LoraShape(LoraConfig, JobPart):
    """Which layers get adapters, and how wide."""


class OpsSpec(JobSpec):
    """A file of operations on one new adapter, done in the order of its lines."""

    model: Identifier
    """The base model."""
    data: FileId
    """JSON lines; each is an ``op`` and the fields of its request, without ids and numbers."""
    lora: LoraShape = LoraShape()
    start_from: Text | None = None
    """A ``tinker://`` path of a training checkpoint that the adapter begins as, with its optimizer's state."""
    on_error: Literal["stop", "continue"] = "stop"
    """Whether operations behind a failed one are still sent. What is under way then, is done in any case."""
    window: int = Field(default=16, ge=1, le=256)
    """Operations that are sent ahead of their results."""
    max_operations: int = Field(default=1_000_000, ge=1, le=MAX_INT32)
    """More lines are refused before the first one is sent."""
