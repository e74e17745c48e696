"""Passes in JSON become the protobuf that newer SDKs send; results become the JSON that older ones read."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from harness.picture_files import picture_file
from twinkle.core.errors import InvalidInput, TooLarge
from twinkle.core.pictures import PictureRules
from twinkle.wire.bodies.base import MAX_VALUES
from twinkle.wire.json_passes import ForwardBackwardRequest, ForwardRequest, peek_json_pass, read_json_pass
from twinkle.wire.json_results import pass_in_json, sample_in_json
from twinkle.wire.sample_result import EMPTY_LOGPROB, SampleResult, TopkLogprobs, WireSequence, encode_sample_response
from twinkle.wire.tensors import sparsify
from twinkle.wire.training import EnvelopeKey, decode_data
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output


def datum(**change: Any) -> dict[str, Any]:
    inputs = {"target_tokens": {"data": [2, 3], "dtype": "int64", "shape": [2]}}
    return {"model_input": {"chunks": [{"tokens": [1, 2]}]}, "loss_fn_inputs": inputs} | change


def body(*data: dict[str, Any], loss_fn: str = "cross_entropy", **more: Any) -> bytes:
    return json.dumps(
        {"forward_input": {"data": data, "loss_fn": loss_fn, **more}, "model_id": "S", "seq_id": 7}
    ).encode()


def test_whole_numbers_keep_every_digit_and_sparse_tensors_stay_sparse() -> None:
    large = {"data": [2**53 + 1, -(2**63)], "dtype": "int64"}
    dense = np.array([[0, 5, 0], [7, 0, 0]], dtype=np.int64)
    csr = sparsify(dense)
    sparse = {
        "data": csr.values.tolist(),
        "dtype": "int64",
        "shape": [2, 3],
        "sparse_crow_indices": csr.crow_indices.tolist(),
        "sparse_col_indices": csr.col_indices.tolist(),
    }

    raw = body(datum(loss_fn_inputs={"large": large, "target_tokens": sparse}), loss_fn="ppo")
    read = decode_data(read_json_pass(ForwardRequest, raw))

    assert (read.model_id, read.seq_id, read.forward_only) == ("S", 7, True)
    assert read.data[0].inputs["large"].tolist() == large["data"]
    np.testing.assert_array_equal(read.data[0].inputs["target_tokens"], dense)


def test_a_picture_comes_with_or_without_its_type() -> None:
    rules = PictureRules(token_id=300, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64)
    file = base64.b64encode(picture_file(1)).decode()
    chunks = [{"tokens": [1]}, {"data": file, "format": "png"}, {"type": "image", "data": file, "format": "png"}]

    read = decode_data(read_json_pass(ForwardRequest, body(datum(model_input={"chunks": chunks}))), picture_rules=rules)

    assert [picture.start for picture in read.data[0].pictures] == [1, 1 + 6]
    assert read.data[0].tokens.tolist() == [1, *[300] * 12]


REFUSED: dict[str, tuple[bytes, str]] = {
    "no loss": (body(datum()).replace(b'"loss_fn":', b'"loss":'), "forward_input.loss_fn: is missing"),
    "a token of a text": (
        body(datum(model_input={"chunks": [{"tokens": ["a"]}]})),
        "forward_input.data[0].model_input.chunks[0].tokens[0]: must be a valid integer, not a text",
    ),
    "sound": (
        body(datum(), datum(model_input={"chunks": [{"type": "dmel"}]})),
        "forward_input.data[1].model_input.chunks[0]: is a chunk of kind dmel; this server takes text and pictures",
    ),
    "halves": (
        body(datum(loss_fn_inputs={"weights": {"data": [0.5], "dtype": "int64"}})),
        "forward_input.data[0].loss_fn_inputs.weights.data: must hold whole numbers, as its dtype is int64",
    ),
    "the other route's body": (
        body(datum()).replace(b"forward_input", b"forward_backward_input"),
        "forward_input: is missing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_place_in_the_message_is_refused_by_name(name: str) -> None:
    raw, words = REFUSED[name]

    with pytest.raises(InvalidInput) as refused:
        read_json_pass(ForwardRequest, raw)

    assert refused.value.message.startswith(words)
    assert peek_json_pass(raw) == EnvelopeKey("S", 7)


def test_tensors_are_left_to_the_worker_in_the_words_it_has_for_protobuf() -> None:
    wrong = {"weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [3]}}
    written = read_json_pass(ForwardRequest, body(datum(loss_fn_inputs=wrong)))

    with pytest.raises(InvalidInput, match=r"data\[0\].loss_fn_inputs.weights.shape: \[3\] does not hold the 2 elem"):
        decode_data(written)


def test_a_large_body_is_known_by_its_end_without_being_read() -> None:
    many = b'{"forward_backward_input": [' + b"1," * (MAX_VALUES + 1) + b'1], "model_id": "S", "seq_id": 9}'

    with pytest.raises(TooLarge, match="more than 2097152; send less at once"):
        read_json_pass(ForwardBackwardRequest, many)

    assert peek_json_pass(many) == EnvelopeKey("S", 9)
    for address in (b'"seq_id": 9', b'"model_id": "S", "seq_id": 0', b'"model_id": "", "seq_id": 9'):
        assert peek_json_pass(many.replace(b'"model_id": "S", "seq_id": 9', address)) is None


def test_results_are_written_as_they_were_read() -> None:
    ragged = (np.array([-1.0, -np.inf], dtype=np.float32), np.array([[-2.0, np.nan]], dtype=np.float32))
    passed = ForwardBackwardResult(ragged, {"loss:sum": np.nan}, elementwise_loss=ragged)
    ids, scores = np.array([[0, 0], [4, 0]], dtype=np.int32), np.array([[EMPTY_LOGPROB] * 2, [-0.5, EMPTY_LOGPROB]])
    sequence = WireSequence(np.array([5], dtype=np.int32), np.array([-0.25], dtype=np.float32), "stop")
    drawn = SampleResult((sequence,), np.array([np.nan, -1.0]), TopkLogprobs(ids, scores.astype(np.float32)))

    outputs = json.loads(b"".join(pass_in_json(encode_forward_backward_output(passed)).pieces))
    samples = json.loads(b"".join(sample_in_json(encode_sample_response(drawn)).pieces))

    assert [one["logprobs"]["data"] for one in outputs["loss_fn_outputs"]] == [[-1.0, "-Infinity"], [-2.0, "NaN"]]
    assert [one["elementwise_loss"]["shape"] for one in outputs["loss_fn_outputs"]] == [[2], [1, 2]]
    assert outputs["metrics"] == {"loss:sum": "NaN"}
    assert samples["prompt_logprobs"] == [None, -1.0]
    assert samples["topk_prompt_logprobs"] == [None, [[4, -0.5]]]
    assert samples["sequences"] == [{"stop_reason": "stop", "tokens": [5], "logprobs": [-0.25]}]


def test_a_result_without_datums_is_one_too() -> None:
    empty = pass_in_json(encode_forward_backward_output(ForwardBackwardResult((), {"loss:sum": 1.0})))

    assert json.loads(b"".join(empty.pieces))["loss_fn_outputs"] == []
