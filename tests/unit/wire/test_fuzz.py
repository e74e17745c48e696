"""Whatever arrives, only the caller's errors come out."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.hostile import mutated
from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import CreateModelRequest, OptimStepRequest, peek_operation
from twinkle.wire.compression import decompress
from twinkle.wire.sample_result import SampledSequence, SampleResult, decode_sample_response, encode_sample_response
from twinkle.wire.sampling import parse_sample
from twinkle.wire.tensors import sparsify
from twinkle.wire.training import (
    ForwardBackwardBody,
    WireDatum,
    canonical_digest,
    decode_data,
    decode_forward_backward_output,
    encode_forward_backward,
    encode_forward_backward_output,
    parse_envelope,
    peek_envelope,
)

DATUM = WireDatum(
    np.array([1, 2, 3]),
    {"target_tokens": np.array([[2, 0], [0, 3], [4, 0]]), "weights": np.ones(3, dtype=np.float32)},
)
VALID_REQUEST = encode_forward_backward(
    ForwardBackwardBody("s:train:0", 1, False, "ppo", {"clip_low_threshold": 0.8, "loss_id": "a"}, (DATUM, DATUM))
)
VALID_OUTPUT = encode_forward_backward_output([np.zeros(3), np.zeros((2, 2))], {"loss:sum": 1.0})
VALID_SAMPLE = encode_sample_response(
    SampleResult(
        (SampledSequence(np.array([1]), np.array([-1.0]), "stop"),),
        prompt_logprobs=np.zeros(3),
        target_prompt_logprobs=sparsify(np.eye(3, dtype=np.float32)),
    )
)
VALID_JSON = (
    b'{"prompt":{"chunks":[{"tokens":[1,2]}]},"sampling_params":{"stop":["a"],"top_p":0.5},"seq_id":1,"num_samples":2,'
    b'"sampling_session_id":"s","target_prompt_logprobs":{"data":[1],"dtype":"int64","shape":[1,1]},'
    b'"model_id":"m","adam_params":{"learning_rate":1e-4},"session_id":"s","model_seq_id":1,"base_model":"m",'
    b'"user_metadata":{"a":[1,2]},"lora_config":{"rank":4}}'
)


def _feed_protobuf(raw: bytes) -> None:
    peek_envelope(raw)
    with contextlib.suppress(InvalidInput):
        envelope = parse_envelope(raw)
        canonical_digest(envelope.message)
        decode_data(envelope)
    for decode in (decode_forward_backward_output, decode_sample_response):
        with contextlib.suppress(InvalidInput):
            decode(raw)


def _feed_json(raw: bytes) -> None:
    peek_operation(raw)
    with contextlib.suppress(InvalidInput):
        parse_sample(raw)
    for body_class in (OptimStepRequest, CreateModelRequest):
        with contextlib.suppress(InvalidInput):
            parse_body(body_class, raw)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), *(mutated(valid) for valid in (VALID_REQUEST, VALID_OUTPUT, VALID_SAMPLE))))
def test_no_protobuf_body_crashes_the_reader(raw: bytes) -> None:
    _feed_protobuf(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | mutated(VALID_JSON))
def test_no_json_body_crashes_the_reader(raw: bytes) -> None:
    _feed_json(raw)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"\x28\xb5\x2f\xfd" + tail))
def test_no_compressed_body_crashes_the_reader(raw: bytes) -> None:
    with contextlib.suppress(InvalidInput, TooLarge):
        assert len(decompress(raw, 1000)) <= 1000


def test_every_single_flipped_byte_is_survived_in_bounded_memory() -> None:
    tracemalloc.start()
    for valid in (VALID_REQUEST, VALID_OUTPUT, VALID_SAMPLE):
        for position in range(len(valid)):
            for value in (0x00, 0x7F, 0x80, 0xFF):
                _feed_protobuf(valid[:position] + bytes([value]) + valid[position + 1 :])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 8 << 20


def test_the_valid_bodies_of_this_fuzz_are_valid() -> None:
    assert len(decode_data(VALID_REQUEST).data) == 2
    assert len(decode_forward_backward_output(VALID_OUTPUT).logprobs) == 2
    assert decode_sample_response(VALID_SAMPLE).sequences[0].stop_reason == "stop"
    assert parse_sample(VALID_JSON).num_samples == 2
    assert parse_body(OptimStepRequest, VALID_JSON).seq_id == 1
    assert parse_body(CreateModelRequest, VALID_JSON).lora_config.rank == 4
