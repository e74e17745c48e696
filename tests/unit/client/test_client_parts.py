"""The rest of the client: where it connects to, what it sends, and that the blocking one is the asynchronous one."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

from harness.scripted_server import Reply, ScriptedServer
from twinkle.client import AsyncClient, Client, Datum, next_token_datum
from twinkle.client.datum import to_wire
from twinkle.client.endpoint import DEFAULT_URL, find_endpoint
from twinkle.client.errors import ConfigError, InvalidInput
from twinkle.client.facade import LoopThread

KEY = "tml-test"


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


def test_the_blocking_client_has_every_method_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(AsyncClient, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(Client, name)).parameters == inspect.signature(method).parameters, name
            assert not inspect.iscoroutinefunction(getattr(Client, name)), name


def test_values_outside_their_limits_are_refused_before_anything_is_sent() -> None:
    session = Reply(200, {"session_id": "s"})
    with ScriptedServer(lambda _: session) as server, Client(server.url, KEY) as client:
        with pytest.raises(InvalidInput, match="rank"):
            client.create_run("b", rank=0)
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
