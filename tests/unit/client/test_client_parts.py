"""The rest of the client: where it connects to, what it sends, and that the blocking one is the asynchronous one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from harness.picture_files import picture_file
from harness.scripted_server import Reply, ScriptedServer
from twinkle.client import AsyncClient, Client, Datum, Picture, next_token_datum
from twinkle.client.datum import to_chunks, to_wire
from twinkle.client.endpoint import DEFAULT_URL, find_endpoint
from twinkle.client.errors import ConfigError, InvalidInput
from twinkle.client.facade import LoopThread
from twinkle.core.pictures import PictureRules
from twinkle.wire.training import ForwardBackwardBody, decode_data, encode_forward_backward

KEY = "tml-test"
RULES = PictureRules(token_id=300, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64)


def test_arguments_win_over_our_variables_and_those_over_the_sdks() -> None:
    ours = {"TWINKLE_SERVER_URL": "http://ours:1/", "TWINKLE_SERVER_TOKEN": "tml-ours"}
    sdks = {"TINKER_BASE_URL": "http://sdk:1", "TINKER_API_KEY": "tml-sdk"}

    assert find_endpoint("http://mine:1", "tml-mine", environment=ours).url == "http://mine:1"
    assert find_endpoint(environment={**ours, **sdks}).url == "http://ours:1"
    assert find_endpoint(environment=sdks).api_key.get_secret_value() == "tml-sdk"
    assert find_endpoint(api_key=KEY, environment={}).url == DEFAULT_URL


@pytest.mark.parametrize(("url", "key"), [(None, None), (None, "sk-other"), ("localhost:8765", KEY)])
def test_an_endpoint_that_cannot_work_is_refused_at_once(url: str | None, key: str | None) -> None:
    with pytest.raises(ConfigError):
        find_endpoint(url, key, environment={})


def test_a_datum_gets_the_types_of_the_wire_and_a_copy() -> None:
    weights = np.ones(2)
    (wire,) = to_wire([Datum([1, 2], {"target_tokens": np.array([2, 3], np.int32), "weights": weights})])
    weights[0] = 5.0

    assert {name: array.dtype.name for name, array in wire.inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
    }
    assert wire.inputs["weights"].tolist() == [1.0, 1.0]


def test_a_text_predicts_its_next_tokens() -> None:
    (wire,) = to_wire([next_token_datum([5, 6, 7])])

    assert wire.tokens.tolist() == [5, 6]
    assert wire.inputs["target_tokens"].tolist() == [6, 7]
    assert wire.inputs["weights"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("datum", "field"),
    [
        (Datum([], {}), r"data\[0\]\.tokens"),
        (Datum([1.5], {}), "whole numbers"),
        (Datum([-1], {}), "from 0"),
        (Datum([[1]], {}), "one dimension"),
        (Datum([1], {"weights": ["heavy"]}), r"data\[0\]\.inputs\.weights"),
        (Datum([1], {"weights": [[1], [1, 2]]}), "not a tensor"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_was_written(datum: Datum, field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        to_wire([datum])


def test_pictures_stand_among_the_tokens_of_a_datum_and_of_a_prompt() -> None:
    picture = Picture(picture_file(1), num_tokens=6)
    (datum,) = to_wire([Datum([[1, 2], picture, np.array([3])], {"target_tokens": [0] * 9})])
    read = decode_data(
        encode_forward_backward(ForwardBackwardBody("m", 1, False, "cross_entropy", {}, (datum,))), picture_rules=RULES
    )

    assert read.data[0].tokens.tolist() == [1, 2, *[RULES.token_id] * 6, 3]
    assert [(one.start, one.num_tokens, one.data) for one in read.data[0].pictures] == [(2, 6, picture.data)]
    chunks = to_chunks([[1, 2], Picture(picture.data)], field="prompt")
    assert chunks[0].tokens == [1, 2]
    assert chunks[1].picture("prompt").num_tokens("prompt", RULES) == 6


@pytest.mark.parametrize(
    ("piece", "field"),
    [
        (Picture(b"GIF89a", 6), "data[0].tokens[1].data"),
        (Picture(picture_file(1)), "data[0].tokens[1].num_tokens"),
        (Picture(picture_file(1), 0), "data[0].tokens[1].num_tokens"),
    ],
)
def test_a_picture_that_cannot_be_sent_is_refused_where_it_was_written(piece: Picture, field: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(field)):
        to_wire([Datum([[1], piece], {})])


def test_the_blocking_client_has_every_method_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(AsyncClient, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(Client, name)).parameters == inspect.signature(method).parameters, name
            assert not inspect.iscoroutinefunction(getattr(Client, name)), name


def test_values_outside_their_limits_are_refused_before_anything_is_sent() -> None:
    session = Reply(200, {"session_id": "s"})
    with ScriptedServer(lambda _: session) as server, Client(server.url, KEY) as client:
        with pytest.raises(InvalidInput, match="rank"):
            client.create_run("b", rank=-1)
        with pytest.raises(InvalidInput, match="base_model"):
            client.sampler()
        assert [seen.path for seen in server.seen] == ["/api/v1/create_session"]


def test_blocking_on_the_clients_own_thread_is_refused() -> None:
    thread = LoopThread("test")

    async def outer() -> None:
        thread.run(inner())

    async def inner() -> None:
        raise AssertionError("it ran")

    with pytest.raises(RuntimeError, match="own thread"):
        thread.run(outer())
    thread.stop()


def test_importing_it_brings_none_of_the_heavy_libraries() -> None:
    heavy = ("torch", "sqlalchemy", "celery", "fastapi", "transformers", "tinker", "orjson")
    code = f"import sys, twinkle.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
