"""The message classes made from schema.proto and the SDK's own are interchangeable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types import Datum, ForwardBackwardInput, ModelInput, TensorData
from tinker.types.forward_backward_request import ForwardBackwardRequest

from twinkle.core.errors import InvalidInput
from twinkle.wire import protobuf as pb
from twinkle.wire.tensors import sparsify, write_tensor
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
    elementwise_loss,
    encode_forward_backward_output,
)

GOLDEN_REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f6b656e73121f0a18"
    "0200000000000000030000000000000004000000000000001802220103121e0a077765696768747312130a0c0000803f0000803f0000"
    "803f1801220103220d63726f73735f656e74726f7079"
)
GOLDEN_OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f7264123f0a0b41727261795265636f7264122e0a086c6f6770726f627312220a0c9a9999bf6666a6bf3333"
    "b3bf121000000000000000000c00000000000000180118011a130a086c6f73733a73756d110000004033330f40"
)


def _messages(file: FileDescriptorProto) -> dict[str, DescriptorProto]:
    for message in file.message_type:
        for field in [*message.field, *(field for entry in message.nested_type for field in entry.field)]:
            field.ClearField("json_name")
    return {message.name: message for message in file.message_type}


def test_every_message_has_the_fields_the_sdk_gives_it() -> None:
    theirs, ours = FileDescriptorProto(), FileDescriptorProto()
    sdk.DESCRIPTOR.CopyToProto(theirs)
    pb.Tensor.DESCRIPTOR.file.CopyToProto(ours)

    for name, message in _messages(ours).items():
        assert message == _messages(theirs)[name]
    our_enums = {enum.name: enum for enum in ours.enum_type}
    assert our_enums == {enum.name: enum for enum in theirs.enum_type if enum.name in our_enums}


@pytest.mark.parametrize("name", ["schema", "perfetto"])
def test_the_descriptors_are_what_protoc_makes_of_the_schema(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made.binpb"
    source = Path(pb.__file__).parents[2]
    arguments = ["protoc", f"-I{source}", f"--descriptor_set_out={made}", f"{source}/twinkle/wire/{name}.proto"]

    assert protoc.main(arguments) == 0
    assert FileDescriptorSet.FromString(made.read_bytes()) == FileDescriptorSet.FromString(
        (source / "twinkle" / "wire" / f"{name}.binpb").read_bytes()
    )


def test_the_golden_request_reads_and_writes_back() -> None:
    body = decode_data(GOLDEN_REQUEST)

    assert (body.model_id, body.seq_id, body.forward_only) == ("s:train:0", 1, False)
    assert body.loss_fn == "cross_entropy"
    assert body.data[0].tokens.tolist() == [1, 2, 3]
    assert body.data[0].tokens.dtype == np.int64
    assert body.data[0].inputs["target_tokens"].tolist() == [2, 3, 4]
    assert body.data[0].inputs["weights"].dtype == np.float32
    written = encode_forward_backward(body)
    assert sdk.ForwardBackwardRequest.FromString(written) == sdk.ForwardBackwardRequest.FromString(GOLDEN_REQUEST)
    assert len(written) == 130


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_cross_entropy_without_weights_counts_every_target_once(loss_fn: str) -> None:
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn=loss_fn)
    for targets in (np.array([2, 3]), np.array([[2, 3], [4, 5]]), sparsify(np.array([[2, 0], [0, 5]]))):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2], dtype="<i4").tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(write_tensor(targets))

    weights = [datum.inputs.get("weights") for datum in decode_data(message.SerializeToString()).data]

    if loss_fn == "ppo":
        assert weights == [None] * 3
        return
    # What a sparse tensor does not list is no target.
    assert [array.tolist() for array in weights if array is not None] == [[1, 1], [[1, 1], [1, 1]], [[1, 0], [0, 1]]]
    assert {array.dtype for array in weights if array is not None} == {np.dtype(np.float32)}


def test_the_golden_output_is_written_to_the_byte() -> None:
    loss = decode_forward_backward_output(GOLDEN_OUTPUT).metrics["loss:sum"]

    written = encode_forward_backward_output(
        ForwardBackwardResult((np.array([-1.2, -1.3, -1.4], dtype=np.float32),), {"loss:sum": loss})
    )

    assert written == GOLDEN_OUTPUT


def test_what_the_sdk_sends_is_read_whole() -> None:
    sparse = TensorData(
        data=[5, 7], dtype="int64", shape=[3, 4], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[2, 0]
    )
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": sparse, "weights": TensorData(data=[0.5, 0.0, -1.0], dtype="float32")},
    )
    request = ForwardBackwardRequest(
        model_id="s:train:0",
        seq_id=4,
        forward_backward_input=ForwardBackwardInput(
            data=[datum], loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5, "loss_id": "abc"}
        ),
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = True

    body = decode_data(message.SerializeToString())

    assert body.forward_only
    assert body.loss_fn_config == {"clip_low_threshold": 0.5, "loss_id": "abc"}
    assert body.data[0].tokens.tolist() == [1, 2, 3]
    assert body.data[0].inputs["target_tokens"].tolist() == [[0, 0, 5, 0], [0, 0, 0, 0], [7, 0, 0, 0]]
    assert body.data[0].inputs["weights"].tolist() == [0.5, 0.0, -1.0]


@given(
    shapes=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), max_size=6),
    names=st.lists(st.text("lossµ→", min_size=1, max_size=40), max_size=4, unique=True),
    is_wide=st.booleans(),
)
def test_no_result_is_larger_than_it_is_taken_for(shapes: list[list[int]], names: list[str], is_wide: bool) -> None:
    arrays = tuple(np.zeros(shape, dtype=np.float64 if is_wide else np.float32) for shape in shapes)
    metrics = {f"{name}:sum": 1.5 for name in names}

    for result in (
        ForwardBackwardResult(arrays, metrics, arrays),
        ForwardBackwardResult((), metrics, embeddings=arrays),
    ):
        assert len(encode_forward_backward_output(result)) <= result.most_bytes


def test_the_sdk_reads_results_with_mixed_shapes_in_order() -> None:
    logprobs = [np.full(3, -1.0), np.full((2, 4), -2.0), np.full((1, 4), -3.0), np.full(2, -4.0), np.empty(0)]

    raw = encode_forward_backward_output(
        ForwardBackwardResult(tuple(a.astype(np.float32) for a in logprobs), {"loss:sum": 2.5})
    )

    theirs = deserialize_forward_backward_output(raw)
    assert theirs.metrics == {"loss:sum": 2.5}
    for output, sent in zip(theirs.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), sent)
    ours = decode_forward_backward_output(raw)
    for array, sent in zip(ours.logprobs, logprobs, strict=True):
        np.testing.assert_array_equal(array, sent)


def test_the_sdk_reads_the_loss_of_every_target_beside_its_logprob() -> None:
    targets = [np.array([2, 3]), np.array([[2, 3], [4, 5]])]
    weights = [np.array([0.5, 0.0], dtype=np.float32), np.array([[1, -1], [2, 0]], dtype=np.float32)]
    logprobs = [np.array([-1, -2], dtype=np.float32), np.array([[-1, -2], [-3, -4]], dtype=np.float32)]
    data = tuple(
        WireDatum(np.array([1, 2]), {"target_tokens": some, "weights": own})
        for some, own in zip(targets, weights, strict=True)
    )
    body = ForwardBackwardBody("s:train:0", 1, False, "cross_entropy", {}, data)

    raw = encode_forward_backward_output(
        ForwardBackwardResult(tuple(logprobs), {"loss:sum": 1.0}, elementwise_loss(body, logprobs))
    )

    outputs = deserialize_forward_backward_output(raw).loss_fn_outputs
    assert [output["logprobs"].tolist() for output in outputs] == [array.tolist() for array in logprobs]
    assert [output["elementwise_loss"].tolist() for output in outputs] == [[0.5, 0.0], [[1.0, -2.0], [6.0, 0.0]]]
    assert [array.tolist() for array in decode_forward_backward_output(raw).elementwise_loss] == [
        [0.5, 0.0], [[1.0, -2.0], [6.0, 0.0]],
    ]  # fmt: skip
    assert elementwise_loss(replace(body, loss_fn="ppo"), logprobs) == ()


@pytest.mark.parametrize("key", ["loss", "a:b:c", ":sum", "loss:"])
def test_a_metric_without_exactly_one_reduction_is_a_bug_of_ours(key: str) -> None:
    with pytest.raises(ValueError, match="name:reduction"):
        encode_forward_backward_output(ForwardBackwardResult((), {key: 1.0}))


def test_the_address_is_read_although_the_tensors_are_nonsense() -> None:
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=7, loss_fn="cross_entropy")
    message.data.add().loss_fn_inputs["weights"].dense = b"123"
    raw = message.SerializeToString()

    envelope = parse_envelope(raw)

    assert (envelope.model_id, envelope.seq_id) == ("s:train:0", 7)
    with pytest.raises(InvalidInput, match=r"data\[0\]\.loss_fn_inputs\.weights") as caught:
        decode_data(envelope)
    assert caught.value.field.startswith("data[0].loss_fn_inputs.weights")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("image", "is a picture, but this model takes text alone"), ("dmel", "this server takes text and pictures")],
)
def test_other_media_than_text_are_refused_with_the_reason(kind: str, reason: str) -> None:
    message = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    chunk = message.data.add().model_input.add()
    getattr(chunk, kind).SetInParent()

    with pytest.raises(InvalidInput, match=reason):
        decode_data(message.SerializeToString())


def test_the_first_bytes_of_an_oversized_body_tell_whose_it_is() -> None:
    prefix = GOLDEN_REQUEST[:40]

    key = peek_envelope(prefix)

    assert key is not None
    assert (key.model_id, key.seq_id) == ("s:train:0", 1)
    assert peek_envelope(GOLDEN_REQUEST[:8]) is None
    assert peek_envelope(b"") is None


def test_a_resend_has_the_same_digest_in_whatever_order_its_maps_were_written() -> None:
    first, second = pb.ForwardBackwardRequest(), sdk.ForwardBackwardRequest()
    names = [f"input_{i}" for i in range(100)]
    for message, order in ((first, names), (second, names[::-1])):
        datum = message.data.add()
        for name in order:
            datum.loss_fn_inputs[name].dense = name.encode()
    resent = pb.parse_message(pb.ForwardBackwardRequest, second.SerializeToString())

    assert canonical_digest(first) == canonical_digest(resent)
    resent.seq_id = 3
    assert canonical_digest(first) != canonical_digest(resent)


def test_a_body_of_countless_empty_parts_is_refused_before_it_is_built() -> None:
    head = pb.ForwardBackwardRequest(model_id="m", seq_id=1).SerializeToString()

    with pytest.raises(InvalidInput, match="send fewer datums"):
        parse_envelope(head + b"\x1a\x00" * 1_000_000)
    datum_of_empty_chunks = b"\x1a\x80\x80\x80\x01" + b"\x0a\x00" * (1 << 20)
    with pytest.raises(InvalidInput, match="send fewer datums"):
        parse_envelope(head + datum_of_empty_chunks)
