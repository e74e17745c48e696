"""Whatever arrives, only the caller's errors come out."""

from __future__ import annotations

import contextlib
import resource
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import crafted
from harness.hostile import mutated
from harness.measured import Cost, measure, traced_peak_bytes
from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.wire.bodies.base import MAX_KEYS, MAX_VALUES, parse_body
from twinkle.wire.bodies.training import CreateModelRequest, OptimStepRequest, peek_operation
from twinkle.wire.compression import decompress, decompress_prefix
from twinkle.wire.protobuf import DTYPE_FLOAT32, DTYPE_INT64, ForwardBackwardRequest, Message, Tensor
from twinkle.wire.sample_result import SampleResult, WireSequence, decode_sample_response, encode_sample_response
from twinkle.wire.sampling import parse_sample
from twinkle.wire.tensors import sparsify
from twinkle.wire.training import (
    ForwardBackwardBody,
    WireDatum,
    canonical_digest,
    decode_data,
    encode_forward_backward,
    parse_envelope,
    peek_envelope,
)
from twinkle.wire.training_result import (
    ForwardBackwardResult,
    decode_forward_backward_output,
    encode_forward_backward_output,
)

DATUM = WireDatum(
    np.array([1, 2, 3]),
    {"target_tokens": np.array([[2, 0], [0, 3], [4, 0]]), "weights": np.ones(3, dtype=np.float32)},
)
VALID_REQUEST = encode_forward_backward(
    ForwardBackwardBody("s:train:0", 1, False, "ppo", {"clip_low_threshold": 0.8, "loss_id": "a"}, (DATUM, DATUM))
)
WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False)
VALID_OUTPUT = encode_forward_backward_output(ForwardBackwardResult((np.zeros(3), np.zeros((2, 2))), {"loss:sum": 1.0}))
VALID_SAMPLE = encode_sample_response(
    SampleResult(
        (WireSequence(np.array([1]), np.array([-1.0]), "stop"),),
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


PROTOBUF_BODIES = st.one_of(
    st.binary(max_size=200), *(mutated(valid) for valid in (VALID_REQUEST, VALID_OUTPUT, VALID_SAMPLE))
)
JSON_BODIES = st.binary(max_size=200) | mutated(VALID_JSON)
COMPRESSED_BODIES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda tail: b"\x28\xb5\x2f\xfd" + tail),
    mutated(zstandard.compress(VALID_REQUEST)),
    mutated(WITHOUT_SIZE.compress(VALID_REQUEST)),
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


def _feed_compressed(raw: bytes) -> None:
    assert len(decompress_prefix(raw, 1000)) <= 1000
    with contextlib.suppress(InvalidInput, TooLarge):
        assert len(decompress(raw, 1000)) <= 1000


@settings(max_examples=300, deadline=None, derandomize=True)
@given(PROTOBUF_BODIES)
def test_no_protobuf_body_crashes_the_reader(raw: bytes) -> None:
    _feed_protobuf(raw)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(JSON_BODIES)
def test_no_json_body_crashes_the_reader(raw: bytes) -> None:
    _feed_json(raw)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(COMPRESSED_BODIES)
def test_no_compressed_body_crashes_the_reader(raw: bytes) -> None:
    _feed_compressed(raw)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@given(PROTOBUF_BODIES, JSON_BODIES, COMPRESSED_BODIES)
def test_none_of_very_many_bodies_does(protobuf: bytes, json: bytes, compressed: bytes) -> None:
    _feed_protobuf(protobuf)
    _feed_json(json)
    _feed_compressed(compressed)


def test_every_single_flipped_byte_is_survived_in_bounded_memory() -> None:
    def read() -> None:
        for valid in (VALID_REQUEST, VALID_OUTPUT, VALID_SAMPLE):
            for position in range(len(valid)):
                for value in (0x00, 0x7F, 0x80, 0xFF):
                    _feed_protobuf(valid[:position] + bytes([value]) + valid[position + 1 :])

    assert traced_peak_bytes(read) < 8 << 20


# Of memory: what a value of JSON takes at most, and how many times its own size a message takes.
_JSON_VALUE_BYTES = 200
_MESSAGE_FACTOR = 24

# What a length or a size may claim: more than there is, than fits in memory, than fits in 32 and 64 bits.
CLAIMS = (2**20, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)


def _tensors_that_claim(claim: int) -> list[Message]:
    sparse = Tensor(dtype=DTYPE_FLOAT32, shape=[claim, claim])
    sparse.sparse_csr.values, sparse.sparse_csr.crow_indices, sparse.sparse_csr.col_indices = b"", bytes(8), b""
    wide = Tensor(dtype=DTYPE_INT64, shape=[1, claim])
    wide.sparse_csr.values, wide.sparse_csr.crow_indices, wide.sparse_csr.col_indices = b"", bytes(16), b""
    return [
        Tensor(dtype=DTYPE_FLOAT32, shape=[claim], dense=bytes(12)),
        Tensor(dtype=DTYPE_FLOAT32, shape=[0, claim, claim, claim], dense=bytes(12)),
        Tensor(dtype=DTYPE_INT64, shape=[-1, claim], dense=b""),
        Tensor(dtype=DTYPE_INT64, shape=[claim] * 1000, dense=b""),
        sparse,
        wide,
    ]


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claimed_size_takes_no_memory(claim: int) -> None:
    bodies = []
    for tensor in _tensors_that_claim(claim):
        message = ForwardBackwardRequest.FromString(VALID_REQUEST)
        message.data[0].loss_fn_inputs["weights"].CopyFrom(tensor)
        bodies.append(message.SerializeToString())

    def read() -> None:
        for raw in bodies:
            with contextlib.suppress(InvalidInput):
                decode_data(raw, max_cells=1 << 18)
        for field_number in range(1, 8):
            _feed_protobuf(_varint(field_number << 3 | 2) + _varint(claim) + VALID_REQUEST)

    assert traced_peak_bytes(read) < 8 << 20


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_frame_that_claims_a_size_takes_no_memory(claim: int) -> None:
    # RFC 8878, 3.1.1: a single-segment frame with a content size of eight bytes, and one with a window descriptor.
    claims_content = b"\x28\xb5\x2f\xfd\xe0" + claim.to_bytes(8, "little") + b"\x01\x00\x00"
    claims_window = b"\x28\xb5\x2f\xfd\x00" + bytes([min(claim.bit_length() - 11, 31) << 3]) + b"\x01\x00\x00"

    def open_both() -> None:
        before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for raw in (claims_content, claims_window):
            decompress_prefix(raw, 1000)
            with contextlib.suppress(InvalidInput, TooLarge):
                assert decompress(raw, 1 << 16) == b""
        # The window is zstd's own memory, which Python does not trace.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < 64 << 20

    assert traced_peak_bytes(open_both) < 1 << 20


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    return measure("harness.crafted", timeout_s=500)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("name", crafted.READINGS)
def test_a_crafted_body_takes_bounded_memory_and_time(costs: dict[str, Cost], name: str) -> None:
    in_json = not name.startswith(("passes:", "zstd:"))

    assert costs[name].peak_bytes < (
        _JSON_VALUE_BYTES * MAX_VALUES if in_json else _MESSAGE_FACTOR * crafted.SIZE_BYTES
    )
    assert costs[name].cpu_s < 10


def test_a_body_of_very_many_values_is_too_large_before_it_is_read() -> None:
    raw = b'{"prompt":{"chunks":[{"tokens":[' + b"1," * MAX_VALUES + b"1]}]}}"

    with pytest.raises(TooLarge, match=f"more than {MAX_VALUES}; send less"):
        parse_sample(raw)


def test_a_body_of_very_many_keys_is_too_large_before_it_is_read() -> None:
    raw = b"{" + b",".join(b'"k%d":1' % number for number in range(MAX_KEYS + 1)) + b"}"

    with pytest.raises(TooLarge, match=f"holds {MAX_KEYS + 1} keys, more than {MAX_KEYS}; send less"):
        parse_sample(raw)


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def test_the_valid_bodies_of_this_fuzz_are_valid() -> None:
    assert len(decode_data(VALID_REQUEST).data) == 2
    assert len(decode_forward_backward_output(VALID_OUTPUT).logprobs) == 2
    assert decode_sample_response(VALID_SAMPLE).sequences[0].stop_reason == "stop"
    assert parse_sample(VALID_JSON).num_samples == 2
    assert parse_body(OptimStepRequest, VALID_JSON).seq_id == 1
    assert parse_body(CreateModelRequest, VALID_JSON).lora_config.rank == 4
