"""Jobs of raw operations: what is to be done with a file of them, and what each line of it may be.

A line is an operation's request without ids and numbers: those follow from its place. Names of saves stand for what was
saved further up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.base import MAX_INT32, MAX_INT64, Identifier, Text, TtlSeconds, read_keys
from twinkle.wire.bodies.jobs_base import FileId, JobPart, JobSpec, parse_part
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sampling import MAX_NUM_SAMPLES, SamplingParams, TokenId, TopK

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class OpsSpec(JobSpec):
    """A file of operations on one new adapter, done in the order of its lines."""

    model: Identifier = Field(description="a base model that is served, or a tinker:// checkpoint to go on from")
    with_optimizer: bool = Field(default=True, description="take over the checkpoint's optimizer state too")
    data: FileId = Field(
        description="a file of JSON lines; each is an `op` and the fields of its request, without ids and numbers"
    )
    rank: int = Field(default=32, ge=1, le=MAX_INT32)
    lora_seed: int | None = Field(default=None, ge=0, le=MAX_INT64, description="default: drawn by the seed")
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    on_error: Literal["stop", "continue"] = Field(
        default="stop", description="whether lines behind a failed one are still sent; what is under way then is done"
    )
    window: int = Field(default=16, ge=1, le=256, description="operations that are sent before their results are read")
    seed: int | None = Field(default=None, ge=0, le=MAX_INT64, description="default: follows from the job")


class OpsDatum(JobPart):
    """One example: token ids, and the loss's tensors by name."""

    tokens: TokenIds
    inputs: dict[Text, list[Any]]


class PassLine(JobPart):
    """``forward_backward`` or ``forward``: a batch, under a loss."""

    op: Literal["forward_backward", "forward"]
    data: list[OpsDatum] = Field(min_length=1)
    loss_fn: Identifier = "cross_entropy"
    loss_fn_config: dict[Text, float | str] = Field(default={})


class OptimStepLine(JobPart):
    """``optim_step``: apply the gradients of the passes before it."""

    op: Literal["optim_step"]
    adam_params: AdamParams = AdamParams()


class SaveLine(JobPart):
    """``save_weights``, with the optimizer's state, or ``save_weights_for_sampler``."""

    op: Literal["save_weights", "save_weights_for_sampler"]
    name: Identifier
    ttl_seconds: TtlSeconds | None = None


class LoadLine(JobPart):
    """``load_weights``: go on as a checkpoint, or as what was saved further up under a name."""

    op: Literal["load_weights"]
    path: Text
    with_optimizer: bool = True


class SampleLine(JobPart):
    """``sample``: from the base model, from a ``tinker://`` checkpoint, or from a save further up by its name."""

    op: Literal["sample"]
    prompt: TokenIds
    source: Text | None = None
    num_samples: int = Field(default=1, ge=1, le=MAX_NUM_SAMPLES)
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: TopK = 0
    topk_sample_logprobs: TopK = 0


OpsLine: TypeAlias = PassLine | OptimStepLine | SaveLine | LoadLine | SampleLine

_LINES: Mapping[str, type[PassLine | OptimStepLine | SaveLine | LoadLine | SampleLine]] = {
    "forward_backward": PassLine,
    "forward": PassLine,
    "optim_step": OptimStepLine,
    "save_weights": SaveLine,
    "save_weights_for_sampler": SaveLine,
    "load_weights": LoadLine,
    "sample": SampleLine,
}


def parse_line(raw: bytes) -> OpsLine:
    """Reads one line.

    Raises:
        InvalidInput: It is none, with the field at fault.
    """
    op = read_keys(raw).get("op")
    line_class = _LINES.get(op) if isinstance(op, str) else None
    if line_class is None:
        raise InvalidInput("op", f"must be one of {', '.join(_LINES)}")
    return parse_part(line_class, raw)
