"""Results of passes and samples in JSON, for SDKs before 0.22, which read no protobuf.

They are stored as protobuf, whoever asked for them. A number that is not finite is written as the text ``"NaN"`` or the
like, which those SDKs read as the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic_core import to_json

from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.json_pieces import with_array
from twinkle.wire.sample_result import EMPTY_LOGPROB, SampleResult, StopReason, TopkLogprobs, decode_sample_response
from twinkle.wire.tensors import Array
from twinkle.wire.training_result import decode_forward_backward_output


class TensorResponse(ResponseBody):
    """A dense tensor; its data are flat."""

    data: list[float]
    dtype: Literal["float32"] = "float32"
    shape: list[int]


class ForwardBackwardOutput(ResponseBody):
    """Result of ``forward_backward`` and ``forward``: for each datum its tensors by name."""

    loss_fn_output_type: str = "ArrayRecord"
    loss_fn_outputs: list[dict[str, TensorResponse]]
    metrics: dict[str, float]


class SequenceResponse(ResponseBody):
    """One sample."""

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float]


class SampleResponse(ResponseBody):
    """Result of ``asample``: what those SDKs know of it. ``null`` where a prompt's token has no score."""

    sequences: list[SequenceResponse]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    type: Literal["sample"] = "sample"


@dataclass(frozen=True)
class JsonResult:
    """A result in JSON."""

    pieces: Iterator[bytes]
    """Made as they are asked for, datum by datum or sequence by sequence."""
    largest_bytes: int
    """Of what one datum or sequence takes as arrays."""


def pass_in_json(raw: bytes) -> JsonResult:
    """The result of a pass, read from its protobuf: a :class:`ForwardBackwardOutput`."""
    result = decode_forward_backward_output(raw)
    named = {
        "logprobs": result.logprobs,
        "elementwise_loss": result.elementwise_loss,
        "embeddings": result.embeddings,
    }
    columns = [(name, arrays) for name, arrays in named.items() if arrays]
    num_datums = max((len(arrays) for _, arrays in columns), default=0)
    outputs = ({name: _tensor(arrays[i]) for name, arrays in columns} for i in range(num_datums))
    head = {"loss_fn_output_type": "ArrayRecord"}
    return JsonResult(
        pieces=with_array(head, "loss_fn_outputs", outputs, {"metrics": result.metrics}, write=_write),
        largest_bytes=max((sum(arrays[i].nbytes for _, arrays in columns) for i in range(num_datums)), default=0),
    )


def sample_in_json(raw: bytes) -> JsonResult:
    """The result of a sample, read from its protobuf: a :class:`SampleResponse`, without its nulls."""
    result = decode_sample_response(raw)
    sequences = (
        {"stop_reason": one.stop_reason, "tokens": one.tokens.tolist(), "logprobs": one.logprobs.tolist()}
        for one in result.sequences
    )
    return JsonResult(
        pieces=_with_scores(result, sequences),
        largest_bytes=max((result.prompt_bytes, *(one.size_bytes for one in result.sequences))),
    )


def _with_scores(result: SampleResult, sequences: Iterator[Mapping[str, object]]) -> Iterator[bytes]:
    tail: dict[str, object] = {"type": "sample"}
    if result.prompt_logprobs is not None:
        tail["prompt_logprobs"] = [_score(one) for one in result.prompt_logprobs.tolist()]
    if result.topk_prompt_logprobs is not None:
        tail["topk_prompt_logprobs"] = _rows(result.topk_prompt_logprobs)
    yield from with_array({}, "sequences", sequences, tail, write=_write)


def _write(value: object) -> bytes:
    """As those SDKs read it."""
    return to_json(value, inf_nan_mode="strings")


def _tensor(array: Array) -> dict[str, object]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def _score(logprob: float) -> float | None:
    return None if math.isnan(logprob) else logprob


def _rows(topk: TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    pairs = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    rows = [
        [(token, score) for token, score in zip(tokens, scores, strict=True) if score != EMPTY_LOGPROB]
        for tokens, scores in pairs
    ]
    return [row or None for row in rows]
