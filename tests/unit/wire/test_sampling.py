"""Sample requests are judged field by field, and the SDK reads the results."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tinker.types as sdk
from tinker._compat import model_dump
from tinker.proto.response_conv import deserialize_sample_response
from tinker.types.sample_request import SampleRequest as SdkSampleRequest

from twinkle.core.errors import InvalidInput
from twinkle.wire.sample_result import (
    EMPTY_LOGPROB,
    EMPTY_TOKEN,
    PromptAltTokens,
    SampleResult,
    TopkLogprobs,
    WireSequence,
    decode_sample_response,
    encode_sample_response,
)
from twinkle.wire.sampling import parse_sample
from twinkle.wire.tensors import Csr, sparsify

GOLDEN_RESPONSE = bytes.fromhex("0a14120807000000080000001a08000080bf000000c012080000c07f0000c0bf")
SEQUENCE = WireSequence(np.array([7, 8]), np.array([-1.0, -2.0]), "stop")


def _body(**changes: Any) -> bytes:
    body: dict[str, Any] = {
        "prompt": {
            "chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}, {"tokens": [4, 5], "type": "encoded_text"}]
        },
        "sampling_params": {},
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        "type": "sample",
    }
    return json.dumps({**body, **changes}).encode()


def test_what_the_sdk_sends_arrives() -> None:
    request = SdkSampleRequest(
        num_samples=2,
        prompt=sdk.ModelInput.from_ints([1, 2, 3]),
        sampling_params=sdk.SamplingParams(max_tokens=5, seed=3, stop=[7, 8], temperature=0.7, top_k=10, top_p=0.9),
        sampling_session_id="s:sample:0",
        seq_id=4,
        prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        topk_prompt_logprobs=5,
    )

    body = parse_sample(json.dumps(model_dump(request, exclude_none=True, mode="json")).encode())

    assert body.read_prompt()[0] == [1, 2, 3]
    assert (body.num_samples, body.seq_id, body.prompt_logprobs_last_n, body.topk_prompt_logprobs) == (2, 4, 2, 5)
    params = body.sampling_params
    assert (params.max_tokens, params.seed, params.temperature, params.top_k, params.top_p) == (5, 3, 0.7, 10, 0.9)
    assert (params.stop_tokens, params.stop_strings, params.stops_at_end_of_text) == ([7, 8], [], False)


def test_the_chunks_of_a_prompt_are_joined() -> None:
    assert parse_sample(_body()).read_prompt()[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("stop", "strings", "tokens", "implicit"),
    [
        (None, [], [], True),
        ([], [], [], False),
        ("x", ["x"], [], False),
        (["x"], ["x"], [], False),
        ([9], [], [9], False),
    ],
)
def test_an_absent_stop_differs_from_an_empty_one(stop: Any, strings: Any, tokens: Any, implicit: bool) -> None:
    params = parse_sample(_body(sampling_params={"stop": stop} if stop is not None else {})).sampling_params

    assert (params.stop_strings, params.stop_tokens, params.stops_at_end_of_text) == (strings, tokens, implicit)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": [-1]}, "stop"),
        ({"stop": [True]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop": ["a"] * 2000}, "stop"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_parameters_outside_their_range_are_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_sample(_body(sampling_params=params))

    assert caught.value.field == f"sampling_params.{field}"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 17}, "num_samples"),
        ({"seq_id": None}, "seq_id"),
        ({"seq_id": -1}, "seq_id"),
        ({"seq_id": None, "sampling_session_id": None}, "sampling_session_id"),
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "prompt.chunks[0].tokens[0]"),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks[0].tokens[0]"),
        ({"prompt": {"chunks": [{"type": "dmel", "dmel": "eA=="}]}}, "prompt.chunks[0]"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 5}, "prompt_logprobs_last_n"),
        ({"topk_prompt_logprobs": 10_000}, "topk_prompt_logprobs"),
        (
            {"target_prompt_logprobs": {"data": [1.0] * 4, "dtype": "float32", "shape": [4, 1]}},
            "target_prompt_logprobs.dtype",
        ),
        (
            {"target_prompt_logprobs": {"data": [1] * 5, "dtype": "int64", "shape": [5, 1]}},
            "target_prompt_logprobs.shape",
        ),
        ({"target_prompt_logprobs": {"data": [1] * 4, "dtype": "int64"}}, "target_prompt_logprobs.shape"),
        ({"target_prompt_logprobs": {"data": [-2] * 4, "dtype": "int64", "shape": [4, 1]}}, "target_prompt_logprobs"),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [4, 10**9],
                    "sparse_crow_indices": [0, 1, 1, 1, 1],
                    "sparse_col_indices": [0],
                }
            },
            "target_prompt_logprobs",
        ),
    ],
)
def test_requests_outside_their_range_are_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_sample(_body(**changes), max_num_samples=16)

    assert caught.value.field == field


def test_sparse_targets_stay_sparse() -> None:
    targets = parse_sample(
        _body(
            target_prompt_logprobs={
                "data": [5, 6],
                "dtype": "int64",
                "shape": [4, 3],
                "sparse_crow_indices": [0, 1, 1, 2, 2],
                "sparse_col_indices": [0, 2],
            }
        )
    ).targets()

    assert isinstance(targets, Csr)
    assert targets.shape == (4, 3)


def test_the_golden_response_is_written_to_the_byte() -> None:
    raw = encode_sample_response(SampleResult((SEQUENCE,), prompt_logprobs=np.array([np.nan, -1.5])))

    assert raw == GOLDEN_RESPONSE


@pytest.mark.parametrize("sparse", [False, True])
def test_the_sdk_reads_a_complete_result_and_so_do_we(sparse: bool) -> None:
    scores = np.array([[0, -1.5], [-2.5, 0]], dtype=np.float32)
    topk = TopkLogprobs(
        np.array([[EMPTY_TOKEN, EMPTY_TOKEN], [3, 4], [5, 6]]),
        np.array([[EMPTY_LOGPROB, EMPTY_LOGPROB], [-1.0, -2.0], [-3.0, -4.0]]),
    )
    result = SampleResult(
        sequences=(
            SEQUENCE,
            WireSequence(np.array([9]), np.array([-0.5]), "length", TopkLogprobs(np.array([[9]]), np.array([[-0.5]]))),
        ),
        prompt_logprobs=np.array([np.nan, -1.0, -2.0]),
        topk_prompt_logprobs=topk,
        target_prompt_logprobs=sparsify(scores) if sparse else scores,
        prompt_alt_tokens=PromptAltTokens(np.array([[1], [2]]), np.array([[-1.0], [-2.0]])),
        prompt_cache_hit_tokens=2,
    )

    raw = encode_sample_response(result)

    theirs = deserialize_sample_response(raw)
    assert [sequence.stop_reason for sequence in theirs.sequences] == ["stop", "length"]
    assert theirs.sequences[0].tokens == [7, 8]
    assert theirs.prompt_logprobs == [None, -1.0, -2.0]
    assert theirs.topk_prompt_logprobs is not None
    assert theirs.topk_prompt_logprobs[0] is None
    assert theirs.topk_prompt_logprobs[1] == [(3, -1.0), (4, -2.0)]
    assert theirs.target_prompt_logprobs is not None
    assert (theirs.target_prompt_logprobs.sparse_crow_indices is not None) == sparse
    np.testing.assert_array_equal(theirs.target_prompt_logprobs.to_numpy(), scores)
    assert theirs.prompt_alt_tokens is not None
    assert theirs.prompt_alt_tokens.tokens.tolist() == [[1], [2]]
    assert theirs.prompt_cache_hit_tokens == 2
    assert encode_sample_response(decode_sample_response(raw)) == raw


def test_arrays_that_belong_together_must_agree() -> None:
    with pytest.raises(ValueError, match="belong together"):
        encode_sample_response(SampleResult((WireSequence(np.array([7]), np.array([-1.0, -2.0]), "stop"),)))
