"""Identifiers that carry meaning parse to what formats back to them, and nothing else parses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.types import ParsedCheckpointTinkerPath

from twinkle.core.errors import InvalidInput
from twinkle.wire.paths import parse_checkpoint_path, parse_model_id, parse_sampling_session_id, validate_name

NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_-]{0,30}(\.[A-Za-z0-9]{1,5})?", fullmatch=True)


@settings(max_examples=100, deadline=None)
@given(NAMES, st.sampled_from(["weights", "sampler_weights", "external_weights"]), st.integers(0, 10**6))
def test_a_checkpoint_path_formats_back_and_the_sdk_agrees(name: str, segment: str, number: int) -> None:
    text = f"tinker://5f0c-a1:train:{number}/{segment}/{name}"

    path = parse_checkpoint_path(text)

    assert str(path) == text
    assert (path.segment, path.name, path.checkpoint_id) == (segment, name, f"{segment}/{name}")
    assert parse_model_id(path.run_id).model_seq_id == number
    theirs = ParsedCheckpointTinkerPath.from_tinker_path(text)
    assert (theirs.training_run_id, theirs.checkpoint_id) == (path.run_id, path.checkpoint_id)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "weights/a",
        "http://r/weights/a",
        "tinker://",
        "tinker://r/weights",
        "tinker://r/weights/",
        "tinker:///weights/a",
        "tinker://r/weights/a/b",
        "tinker://r/wights/a",
        "tinker://r/weights/..",
        "tinker://r/weights/a..b",
        "tinker://../weights/a",
        "tinker://r/weights/a b",
        "tinker://r/weights/a\n",
        "tinker://r/weights/a\x00",
        "tinker://r/weights/ä",
        "tinker://r%2f/weights/a",
        "tinker://r/weights/" + "a" * 256,
    ],
)
def test_any_other_path_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_checkpoint_path(text)


@pytest.mark.parametrize("name", ["a", "step-000100", "ck_1.5", "a" * 255, ".hidden", "A.B"])
def test_good_names_pass(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a:b", "a" * 256, "a\\b", "٣"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        validate_name(name)


def test_ids_format_back() -> None:
    assert str(parse_model_id("s:train:0")) == "s:train:0"
    assert parse_model_id("a:train:b:train:12").session_id == "a:train:b"
    assert str(parse_sampling_session_id("s:sample:7")) == "s:sample:7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "s:train",
        "s:train:",
        ":train:1",
        "s:train:01",
        "s:train:-1",
        "s:train:x",
        "s:sample:1",
        "s/t:train:1",
        "s:train:1\n",
        "s" * 300 + ":train:1",
    ],
)
def test_other_model_ids_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_model_id(text)
