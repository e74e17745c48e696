"""Results of passes and samples in JSON, for SDKs before 0.22, which read no protobuf.

They are stored as protobuf, whoever asked for them. A number that is not finite is written as the text ``"NaN"`` or the
like, which those SDKs read as the number.
"""

from __future__ import annotations

import math
from typing import Literal

from twinkle.wire.bodies.base import ResponseBody
from twinkle.wire.sample_result import EMPTY_LOGPROB, StopReason, TopkLogprobs, decode_sample_response
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


def pass_in_json(raw: bytes) -> bytes:
    """The result of a pass, read from its protobuf."""
    result = decode_forward_backward_output(raw)
    named = {
        "logprobs": result.logprobs,
        "elementwise_loss": result.elementwise_loss,
        "embeddings": result.embeddings,
    }
    columns = [(name, arrays) for name, arrays in named.items() if arrays]
    num_datums = max((len(arrays) for _, arrays in columns), default=0)
    outputs = [{name: _tensor(arrays[i]) for name, arrays in columns} for i in range(num_datums)]
    return ForwardBackwardOutput(loss_fn_outputs=outputs, metrics=result.metrics).to_json()


def sample_in_json(raw: bytes) -> bytes:
    """The result of a sample, read from its protobuf."""
    result = decode_sample_response(raw)
    prompt = None if result.prompt_logprobs is None else [_score(one) for one in result.prompt_logprobs.tolist()]
    topk = None if result.topk_prompt_logprobs is None else _rows(result.topk_prompt_logprobs)
    sequences = [
        SequenceResponse(stop_reason=one.stop_reason, tokens=one.tokens.tolist(), logprobs=one.logprobs.tolist())
        for one in result.sequences
    ]
    return SampleResponse(sequences=sequences, prompt_logprobs=prompt, topk_prompt_logprobs=topk).to_json()


def _tensor(array: Array) -> TensorResponse:
    return TensorResponse(data=array.ravel().tolist(), shape=list(array.shape))


def _score(logprob: float) -> float | None:
    return None if math.isnan(logprob) else logprob


def _rows(topk: TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    pairs = zip(topk.token_ids.tolist(), topk.logprobs.tolist(), strict=True)
    rows = [
        [(token, score) for token, score in zip(tokens, scores, strict=True) if score != EMPTY_LOGPROB]
        for tokens, scores in pairs
    ]
    return [row or None for row in rows]
