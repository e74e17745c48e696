"""The result of ``asample``, as plain numpy and as protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb
from twinkle.wire.tensors import Array, Csr, read_float32, read_int32, read_tensor, write_tensor

StopReason: TypeAlias = Literal["stop", "length"]

# An unfilled cell of TopkLogprobs; the SDK drops it again.
EMPTY_TOKEN = 0
EMPTY_LOGPROB = -99999.0

_STOP_REASON_NUMBERS: dict[StopReason, int] = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
_STOP_REASONS: dict[int, StopReason] = {number: reason for reason, number in _STOP_REASON_NUMBERS.items()}


@dataclass(frozen=True, eq=False)
class TopkLogprobs:
    """The k likeliest tokens at each of L positions: ``token_ids`` and ``logprobs`` are (L, k)."""

    token_ids: Array
    logprobs: Array

    @property
    def size_bytes(self) -> int:
        """What it takes as it is."""
        return self.token_ids.nbytes + self.logprobs.nbytes


@dataclass(frozen=True, eq=False)
class WireSequence:
    """One sample: its tokens, what stopped it included, and a logprob for each."""

    tokens: Array
    logprobs: Array
    stop_reason: StopReason
    topk: TopkLogprobs | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes as it is."""
        return self.tokens.nbytes + self.logprobs.nbytes + (0 if self.topk is None else self.topk.size_bytes)


@dataclass(frozen=True, eq=False)
class PromptAltTokens:
    """Tokens drawn at each prompt position but the first: both are (len(prompt) - 1, k)."""

    tokens: Array
    logprobs: Array


@dataclass(frozen=True, eq=False)
class SampleResult:
    """All that one ``asample`` gives.

    ``prompt_logprobs`` has one entry for each prompt token, NaN where none was computed (always the first).
    ``target_prompt_logprobs`` has the layout of the request's targets: sparse for sparse.
    """

    sequences: tuple[WireSequence, ...]
    prompt_logprobs: Array | None = None
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: Array | Csr | None = None
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0

    @property
    def prompt_bytes(self) -> int:
        """What the scores of the prompt and of its likeliest tokens take as they are."""
        scores = 0 if self.prompt_logprobs is None else self.prompt_logprobs.nbytes
        return scores + (0 if self.topk_prompt_logprobs is None else self.topk_prompt_logprobs.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Those, and all sequences."""
        return self.prompt_bytes + sum(sequence.size_bytes for sequence in self.sequences)


def encode_sample_response(result: SampleResult) -> bytes:
    """Writes a result.

    Raises:
        ValueError: arrays that belong together differ in shape.
    """
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        _require_equal_shapes(sequence.tokens, sequence.logprobs)
        written = message.sequences.add(
            stop_reason=_STOP_REASON_NUMBERS[sequence.stop_reason],
            tokens=_int32_bytes(sequence.tokens),
            logprobs=_float32_bytes(sequence.logprobs),
        )
        if sequence.topk is not None:
            _write_topk(written.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _float32_bytes(result.prompt_logprobs)
    if result.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs)
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(write_tensor(_as_float32(result.target_prompt_logprobs)))
    if result.prompt_alt_tokens is not None:
        alternatives = result.prompt_alt_tokens
        _require_equal_shapes(alternatives.tokens, alternatives.logprobs)
        message.prompt_alt_tokens.tokens.CopyFrom(write_tensor(alternatives.tokens.astype("<i4")))
        message.prompt_alt_tokens.logprobs.CopyFrom(write_tensor(alternatives.logprobs.astype("<f4")))
    return cast(bytes, message.SerializeToString(deterministic=True))


def decode_sample_response(raw: bytes) -> SampleResult:
    """Reads a result; for our own client and tests."""
    message = pb.parse_message(pb.SampleResponse, raw)
    sequences = tuple(_read_sequence(sequence, f"sequences[{i}]") for i, sequence in enumerate(message.sequences))
    prompt_logprobs = topk = targets = alternatives = None
    if message.HasField("prompt_logprobs"):
        prompt_logprobs = read_float32(message.prompt_logprobs, field="prompt_logprobs")
    if message.HasField("topk_prompt_logprobs"):
        topk = _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs")
    if message.HasField("target_prompt_logprobs"):
        targets = read_tensor(message.target_prompt_logprobs, field="target_prompt_logprobs")
    if message.HasField("prompt_alt_tokens"):
        alternatives = _read_alternatives(message.prompt_alt_tokens, "prompt_alt_tokens")
    return SampleResult(sequences, prompt_logprobs, topk, targets, alternatives, message.prompt_cache_hit_tokens)


def _read_sequence(message: pb.Message, field: str) -> WireSequence:
    if message.stop_reason not in _STOP_REASONS:
        raise InvalidInput(f"{field}.stop_reason", f"is unknown: {message.stop_reason}")
    topk = None
    if message.HasField("topk_sampled_logprobs"):
        topk = _read_topk(message.topk_sampled_logprobs, f"{field}.topk_sampled_logprobs")
    return WireSequence(
        tokens=read_int32(message.tokens, field=f"{field}.tokens"),
        logprobs=read_float32(message.logprobs, field=f"{field}.logprobs"),
        stop_reason=_STOP_REASONS[message.stop_reason],
        topk=topk,
    )


def _write_topk(message: pb.Message, topk: TopkLogprobs) -> None:
    _require_equal_shapes(topk.token_ids, topk.logprobs)
    message.length, message.k = topk.token_ids.shape
    message.token_ids = _int32_bytes(topk.token_ids)
    message.logprobs = _float32_bytes(topk.logprobs)


def _read_topk(message: pb.Message, field: str) -> TopkLogprobs:
    token_ids = read_int32(message.token_ids, field=f"{field}.token_ids")
    logprobs = read_float32(message.logprobs, field=f"{field}.logprobs")
    if not token_ids.size == logprobs.size == message.length * message.k:
        raise InvalidInput(field, f"does not hold {message.length} x {message.k} cells")
    shape = (message.length, message.k)
    return TopkLogprobs(token_ids.reshape(shape), logprobs.reshape(shape))


def _read_alternatives(message: pb.Message, field: str) -> PromptAltTokens:
    tokens = read_tensor(message.tokens, field=f"{field}.tokens")
    logprobs = read_tensor(message.logprobs, field=f"{field}.logprobs")
    if isinstance(tokens, Csr) or isinstance(logprobs, Csr):
        raise InvalidInput(field, "must be dense")
    return PromptAltTokens(tokens, logprobs)


def _as_float32(tensor: Array | Csr) -> Array | Csr:
    if isinstance(tensor, Csr):
        return Csr(tensor.values.astype("<f4"), tensor.crow_indices, tensor.col_indices, tensor.shape)
    return tensor.astype("<f4")


def _int32_bytes(array: Array) -> bytes:
    return np.asarray(array, dtype="<i4").tobytes()


def _float32_bytes(array: Array) -> bytes:
    return np.asarray(array, dtype="<f4").tobytes()


def _require_equal_shapes(first: Array, second: Array) -> None:
    if first.shape != second.shape:
        raise ValueError(f"arrays that belong together have the shapes {first.shape} and {second.shape}")
