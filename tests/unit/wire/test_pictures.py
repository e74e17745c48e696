"""Pictures on the wire: counted by their heads alone, refused by name."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, EncodedTextChunk, ForwardBackwardInput, ImageChunk, ModelInput, TensorData
from tinker.types.forward_backward_request import ForwardBackwardRequest

from harness.picture_files import picture_file
from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureLimits, PictureRules
from twinkle.wire.pictures import SentPicture, picture_size
from twinkle.wire.sampling import count_prompt, parse_sample
from twinkle.wire.training import decode_data, encode_forward_backward, judge_pictures, parse_envelope

TOKEN = 300
RULES = PictureRules(token_id=TOKEN, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64)
LIMITS = PictureLimits(max_bytes=10_000, max_pixels=200 * 200, max_pictures=2)
WEIGHTS = TensorData(data=[1.0] * 10, dtype="float32", shape=[10])
TARGETS = TensorData(data=list(range(10)), dtype="int64", shape=[10])


def picture(width: int = 24, height: int = 16, file_format: str = "PNG", **settings: object) -> bytes:
    return picture_file(1, width=width, height=height, file_format=file_format, **settings)


def bomb(width: int, height: int) -> bytes:
    """A few bytes of PNG that say they are of any size."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))


def sent(*chunks: object) -> bytes:
    """What the SDK writes of one datum; text of 4 tokens and a picture of 6 have 10 targets."""
    losses = {"target_tokens": TARGETS, "weights": WEIGHTS}
    datum = Datum(model_input=ModelInput(chunks=list(chunks)), loss_fn_inputs=losses)
    body = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = ForwardBackwardRequest(model_id="m", seq_id=1, forward_backward_input=body)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=list(tokens))


def image(data: bytes, picture_format: str = "png", expected: int | None = 6) -> ImageChunk:
    return ImageChunk(data=data, format=picture_format, expected_tokens=expected)


@pytest.mark.parametrize(
    ("file_format", "settings"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"comment": b"x" * 900})],
)
def test_the_size_is_read_from_the_head_of_a_file(file_format: str, settings: dict[str, object]) -> None:
    data = picture(37, 21, file_format, **settings)
    assert picture_size(data, file_format.lower(), field="data") == (37, 21)
    for end in range(len(data)):
        with suppress(InvalidInput):
            assert picture_size(data[:end], file_format.lower(), field="data") == (37, 21)


def test_a_picture_the_sdk_sends_stands_among_the_tokens_and_goes_out_again_as_it_came() -> None:
    data = picture()
    body = decode_data(sent(text(1, 2), image(data), text(3, 4)), picture_rules=RULES)
    again = decode_data(encode_forward_backward(body), picture_rules=RULES)

    for read in (body, again):
        (datum,) = read.data
        assert datum.tokens.tolist() == [1, 2, *[TOKEN] * 6, 3, 4]
        assert [(one.start, one.num_tokens, one.data) for one in datum.pictures] == [(2, 6, data)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (
            [text(1), image(picture(), expected=7)],
            "data[0].model_input[1].expected_tokens: is 7, but this model makes 6 tokens of 24 x 16 pixels",
        ),
        (
            [image(bomb(60_000, 60_000))],
            "data[0].model_input[0].data: is a picture of 60000 x 60000 pixels, more",
        ),
        ([image(bomb(0, 8))], "data[0].model_input[0].data: is a picture of 0 x 8 pixels, which is none"),
        (
            [image(bomb(402, 2))],
            "data[0].model_input[0].data: is a picture of 402 x 2 pixels: one side is more",
        ),
        ([image(picture(), "jpeg")], "data[0].model_input[0].data: is not a jpeg file"),
        ([image(b"GIF89a" + b"\0" * 50)], "data[0].model_input[0].data: is not a png file"),
        ([image(picture() + b"\0" * 10_000)], "data[0].model_input[0].data: is a file of"),
        ([image(picture())] * 3, "data[0].model_input: holds 3 pictures, more than 2"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_with_its_place_and_the_limit(chunks: list[object], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        judge_pictures(parse_envelope(sent(*chunks)), RULES, LIMITS)
    assert refused.value.message.startswith(message)


def test_the_tokens_of_pictures_are_counted_whether_or_not_the_client_said_them() -> None:
    unsaid, said = image(picture(), expected=None), image(picture(40, 40, "JPEG"), "jpeg", 25)
    envelope = parse_envelope(sent(text(1, 2), unsaid, text(3), said))
    assert envelope.has_pictures
    assert judge_pictures(envelope, RULES, LIMITS) == 6 + 25


def test_what_is_no_format_of_the_sdks_is_refused_by_its_name() -> None:
    with pytest.raises(InvalidInput, match=r"data\.format: must be one of png, jpeg, not 'webp'"):
        SentPicture(picture(), "webp", None).num_tokens("data", RULES)


def sample(*chunks: dict[str, object], **changes: object) -> bytes:
    body = {
        "sampling_session_id": "s:sample:0",
        "seq_id": 1,
        "prompt": {"chunks": list(chunks)},
        **changes,
    }
    return json.dumps(body).encode()


def json_image(data: bytes, **changes: object) -> dict[str, object]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", **changes}


def json_text(*tokens: int) -> dict[str, object]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def test_a_prompt_with_a_picture_says_its_length_once_it_is_counted() -> None:
    data = picture()
    counted = count_prompt(parse_sample(sample(json_text(1, 2), json_image(data), json_text(3))), RULES, LIMITS)

    assert counted.num_prompt_tokens == 9
    tokens, pictures = counted.read_prompt(RULES)
    assert tokens == [1, 2, *[TOKEN] * 6, 3]
    assert [(one.start, one.num_tokens, one.data) for one in pictures] == [(2, 6, data)]


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (json_image(picture(), expected_tokens=5), "prompt.chunks[1].expected_tokens: is 5"),
        (json_image(bomb(10**6, 10**6)), "prompt.chunks[1].data: is a picture of 1000000 x 1000000 pixels"),
        ({"type": "image", "data": "%%%", "format": "png"}, "prompt.chunks[1].data: is not valid base64"),
        ({"type": "image", "format": "png"}, "prompt.chunks[1].data: is missing"),
        ({"type": "image", "data": ""}, "prompt.chunks[1].format: is missing"),
        (json_image(picture(), format="gif"), "prompt.chunks[1].format: must be one of png, jpeg, not 'gif'"),
    ],
)
def test_a_prompt_s_picture_that_cannot_be_is_refused_with_its_place(chunk: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        count_prompt(parse_sample(sample(json_text(1), chunk)), RULES, LIMITS)
    assert refused.value.message.startswith(message)


def test_a_pointer_to_a_picture_is_refused_by_name_and_never_followed() -> None:
    pointer = {"type": "image_asset_pointer", "location": "http://127.0.0.1:9/secret.png", "format": "png"}
    with pytest.raises(InvalidInput, match=r"prompt\.chunks\[0\]: points to a picture, .* opens no addresses"):
        parse_sample(sample(pointer))
    with pytest.raises(InvalidInput, match=r"prompt\.chunks\[1\]: points to a picture"):
        count_prompt(parse_sample(sample(json_image(picture()), pointer)), RULES, LIMITS)


def test_a_model_of_text_alone_takes_no_picture() -> None:
    with pytest.raises(InvalidInput, match=r"prompt\.chunks\[0\]: is a picture, but this model takes text alone"):
        count_prompt(parse_sample(sample(json_image(picture()))), None, LIMITS)


def test_scores_are_judged_by_the_length_with_pictures() -> None:
    request = parse_sample(sample(json_image(picture()), json_text(1), prompt_logprobs=True, prompt_logprobs_last_n=7))
    with pytest.raises(InvalidInput, match=r"prompt_logprobs_last_n: must lie between 1 and 6"):
        count_prompt(request, RULES, LIMITS)


def test_a_chunk_of_text_is_kept_as_it_was_before_there_were_pictures() -> None:
    request = parse_sample(sample(json_text(1, 2)))
    assert request.prompt.model_dump(mode="json") == {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    assert np.array_equal(request.read_prompt()[0], [1, 2])


def test_a_request_of_heads_alone_does_not_grow_beyond_its_budget() -> None:
    rules = replace(RULES, max_pixels=2**40)
    raw = sent(image(bomb(20_000, 20_000), expected=None))
    with pytest.raises(InvalidInput, match=r"data\[0\]\.model_input\[0\]: expands to 6250000 cells"):
        decode_data(raw, max_cells=100_000, picture_rules=rules)
