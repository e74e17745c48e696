"""What a ``forward_backward`` answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from twinkle.wire import protobuf as pb
from twinkle.wire.tensors import Array, read_batched, write_batched
from twinkle.wire.training import WEIGHTED_LOSS, WEIGHTS, ForwardBackwardBody

_RECORD_TYPE = "ArrayRecord"
_MOST_BESIDE_AN_ARRAY = 256
"""What describes it and the record that it may have of its own."""
_MOST_BESIDE_A_NAME = 32
_MOST_BESIDE_ALL = 64


@dataclass(frozen=True, eq=False)
class ForwardBackwardResult:
    """What a ``forward_backward`` answers: per datum the logprobs of its targets, and metrics ``name:reduction``.

    ``elementwise_loss`` is that of each target, for ``cross_entropy``; empty for other losses. Where the loss compares
    ``embeddings`` they come instead of logprobs, per datum float32 (H,).
    """

    logprobs: tuple[Array, ...]
    metrics: dict[str, float]
    elementwise_loss: tuple[Array, ...] = ()
    embeddings: tuple[Array, ...] = ()

    @property
    def most_bytes(self) -> int:
        """No fewer than it has in wire form, where each number takes four."""
        arrays = (*self.logprobs, *self.elementwise_loss, *self.embeddings)
        num_bytes = sum(4 * array.size + _MOST_BESIDE_AN_ARRAY for array in arrays)
        return num_bytes + sum(4 * len(name) + _MOST_BESIDE_A_NAME for name in self.metrics) + _MOST_BESIDE_ALL


def elementwise_loss(body: ForwardBackwardBody, logprobs: Sequence[Array]) -> tuple[Array, ...]:
    """What each target adds to the loss of a ``cross_entropy``, which is their sum; nothing for other losses."""
    if body.loss_fn != WEIGHTED_LOSS:
        return ()
    return tuple(-(datum.inputs[WEIGHTS] * lp) for datum, lp in zip(body.data, logprobs, strict=True))


def encode_forward_backward_output(result: ForwardBackwardResult) -> bytes:
    """Writes a result; neighbours that differ in trailing shape go into records of their own.

    Raises:
        ValueError: a metric is not called ``name:reduction``, which the SDK could not combine over chunks.
    """
    for key in result.metrics:
        if key.count(":") != 1 or key.startswith(":") or key.endswith(":"):
            raise ValueError(f"metric {key!r}: must be called name:reduction, with exactly one colon")
    message = pb.ForwardBackwardOutput(loss_fn_output_type=_RECORD_TYPE, metrics=result.metrics)
    name = "embeddings" if result.embeddings else "logprobs"
    arrays = [np.asarray(array, dtype="<f4") for array in result.embeddings or result.logprobs]
    start = 0
    for _, group in itertools.groupby(arrays, key=lambda array: array.shape[1:]):
        members = list(group)
        end = start + len(members)
        record = message.loss_fn_outputs.add(type_tag=_RECORD_TYPE, num_datums=len(members))
        record.fields[name].CopyFrom(write_batched(members))
        if result.elementwise_loss:
            own = [np.asarray(array, dtype="<f4") for array in result.elementwise_loss[start:end]]
            record.fields["elementwise_loss"].CopyFrom(write_batched(own))
        start = end
    return cast(bytes, message.SerializeToString(deterministic=True))


def decode_forward_backward_output(raw: bytes) -> ForwardBackwardResult:
    """Reads a result; for our own client and tests."""
    message = pb.parse_message(pb.ForwardBackwardOutput, raw)
    read: dict[str, list[Array]] = {"logprobs": [], "elementwise_loss": [], "embeddings": []}
    for i, record in enumerate(message.loss_fn_outputs):
        for name, arrays in read.items():
            if name in record.fields:
                arrays.extend(read_batched(record.fields[name], field=f"loss_fn_outputs[{i}].{name}"))
    return ForwardBackwardResult(
        logprobs=tuple(read["logprobs"]),
        metrics=dict(message.metrics),
        elementwise_loss=tuple(read["elementwise_loss"]),
        embeddings=tuple(read["embeddings"]),
    )
