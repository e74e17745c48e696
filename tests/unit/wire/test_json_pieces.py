"""JSON in pieces: together what one writer would write, and none of them longer than a slice of an array."""

from __future__ import annotations

import json

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from twinkle.wire.json_pieces import MEMBERS_AT_ONCE, in_pieces, with_array
from twinkle.wire.json_results import pass_in_json, sample_in_json
from twinkle.wire.sample_result import SampleResult, WireSequence, encode_sample_response
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output

NUM_LONG = 20 * MEMBERS_AT_ONCE + 1
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.just([0.5] * (MEMBERS_AT_ONCE + 3))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(value=VALUES)
def test_together_they_are_what_one_writer_writes(value: object) -> None:
    assert b"".join(in_pieces(value)) == orjson.dumps(value)


@given(head=st.dictionaries(st.sampled_from("ab"), VALUES), parts=st.lists(VALUES, max_size=3), tail=VALUES)
def test_so_are_those_of_an_object_around_an_array(head: dict[str, object], parts: list[object], tail: object) -> None:
    ends = {"end": tail} if tail else {}

    assert orjson.loads(b"".join(with_array(head, "parts", parts, ends))) == {**head, "parts": parts, **ends}


def test_one_long_sequence_is_written_slice_by_slice() -> None:
    row = {"tokens": list(range(NUM_LONG)), "deeper": {"logprobs": [[[1, -0.5]]] * NUM_LONG}}
    pieces = list(in_pieces(row))

    assert json.loads(b"".join(pieces)) == row
    assert max(map(len, pieces)) < len(b"".join(pieces)) / 10


def test_so_are_results_for_sdks_that_read_json_alone() -> None:
    scores = np.full(NUM_LONG, -0.5, dtype=np.float32)
    sequence = WireSequence(np.zeros(NUM_LONG, dtype=np.int32), scores, "length")
    sampled = sample_in_json(encode_sample_response(SampleResult((sequence, sequence))))
    passed = pass_in_json(encode_forward_backward_output(ForwardBackwardResult((scores,), {})))

    for result in (sampled, passed):
        pieces = list(result.pieces)
        assert max(map(len, pieces)) < len(b"".join(pieces)) / 10
    assert (sampled.largest_bytes, passed.largest_bytes) == (8 * NUM_LONG, 4 * NUM_LONG)
