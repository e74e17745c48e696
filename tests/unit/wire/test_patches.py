"""Pictures in patches on the wire: placed among the tokens, or refused by name before anything is computed."""

from __future__ import annotations

import numpy as np
import pytest
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, EncodedTextChunk, ForwardBackwardInput, ImageChunk, ModelInput, TensorData
from tinker.types.forward_backward_request import ForwardBackwardRequest

from harness.picture_files import picture_file
from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire.training import decode_data, encode_forward_backward, judge_pictures, parse_envelope

TOKEN = 300
RULES = PictureRules(token_id=TOKEN, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64)
LIMITS = PictureLimits(max_bytes=10_000, max_pixels=200 * 200, max_pictures=2)
TOKENS = [1, *[TOKEN] * 2, 2, *[TOKEN] * 6, 3]
GRIDS = np.array([[1, 2, 4], [1, 4, 6]])
PATCHES = np.arange(32 * 5, dtype=np.float32).reshape(32, 5)


def sent(*, tokens=TOKENS, chunks=(), **changes: np.ndarray | None) -> bytes:
    """What the SDK writes of one datum, some of its inputs changed."""
    inputs = {
        "target_tokens": np.zeros(len(tokens), np.int64),
        "pixel_values": PATCHES,
        "image_grid_thw": GRIDS,
        "mm_token_type_ids": (np.array(tokens) == TOKEN).astype(np.int64),
        **changes,
    }
    given = {name: TensorData.from_numpy(values) for name, values in inputs.items() if values is not None}
    prompt = ModelInput(chunks=[EncodedTextChunk(tokens=list(tokens)), *chunks])
    body = ForwardBackwardInput(data=[Datum(model_input=prompt, loss_fn_inputs=given)], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=body)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


@pytest.mark.parametrize("changes", [{}, {"pixel_values": PATCHES.reshape(-1), "image_grid_thw": GRIDS.reshape(-1)}])
def test_patches_stand_where_their_tokens_are_and_go_out_again_as_they_came(changes) -> None:
    raw = sent(**changes)
    assert parse_envelope(raw).has_pictures
    assert judge_pictures(parse_envelope(raw), RULES, LIMITS) == 0
    body = decode_data(raw, picture_rules=RULES)

    for read in (body, decode_data(encode_forward_backward(body), picture_rules=RULES)):
        (datum,) = read.data
        assert datum.tokens.tolist() == TOKENS
        assert set(datum.inputs) == {"target_tokens", "weights"}
        first, second = datum.patches
        assert (first.start, first.num_tokens, first.grid_thw) == (1, 2, (1, 2, 4))
        assert (second.start, second.num_tokens, second.grid_thw) == (4, 6, (1, 4, 6))
        assert np.array_equal(np.concatenate([first.pixel_values, second.pixel_values]), PATCHES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_grid_thw": None}, "image_grid_thw: is missing; send it with pixel_values"),
        ({"image_grid_thw": np.array([[1, 2]])}, "send (pictures, 3) integers"),
        ({"image_grid_thw": np.array([[2, 2, 4]])}, "image_grid_thw[0]: is [2, 2, 4]; a picture is one moment"),
        ({"image_grid_thw": np.array([[1, 3, 4]])}, "multiples of 2"),
        ({"image_grid_thw": np.array([[1, 32, 32]])}, "is of 128 x 128 pixels, but this model's processor makes"),
        ({"image_grid_thw": np.repeat(GRIDS, 2, axis=0)}, "holds 4 pictures, more than 2"),
    ],
)
def test_grids_that_cannot_be_are_refused_when_they_come(changes, message) -> None:
    with pytest.raises(InvalidInput) as refused:
        judge_pictures(parse_envelope(sent(**changes)), RULES, LIMITS)
    assert message in refused.value.message


def test_patches_for_a_model_of_text_alone_are_refused_when_they_come() -> None:
    with pytest.raises(InvalidInput, match=r"pixel_values: is a picture, but this model takes text alone"):
        judge_pictures(parse_envelope(sent()), None, LIMITS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_values": None}, "pixel_values: is missing; send it with image_grid_thw"),
        ({"pixel_values": PATCHES[:31]}, "a row for each of 32 patches"),
        ({"pixel_values": PATCHES.reshape(16, 10)}, "has 16 rows for the 32 patches"),
        ({"pixel_values": np.where(PATCHES == 7, np.nan, PATCHES)}, "send finite numbers"),
        ({"tokens": [1, *[TOKEN] * 7, 3]}, "holds 7 tokens 300 that stand for pictures, but image_grid_thw makes 8"),
        ({"mm_token_type_ids": np.zeros(len(TOKENS), np.int64)}, "is not 1 exactly where tokens stand for pictures"),
        (
            {"chunks": (ImageChunk(data=picture_file(1), format="png", expected_tokens=6),)},
            "comes beside files of pictures",
        ),
    ],
)
def test_patches_that_do_not_fit_their_tokens_are_refused_before_the_pass(changes, message) -> None:
    with pytest.raises(InvalidInput) as refused:
        decode_data(sent(**changes), picture_rules=RULES)
    assert message in refused.value.message
