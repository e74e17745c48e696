"""The way to a server of the Twinkle dialect: what is sent, what is sent again, what an error says, what goes on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import tomllib
import weakref
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from structlog.testing import capture_logs

from harness.polling import wait_until
from harness.scripted_server import Reply, ScriptedServer, Seen
from harness.servers import free_port
from twinkle.client.backoff import RetryPolicy
from twinkle_client.client import TwinkleClient, init_twinkle_client
from twinkle_client.connection import Connection
from twinkle_client.endpoint import find_endpoint
from twinkle_client.errors import (
    CallFailed,
    ClientClosed,
    ConfigError,
    Conflict,
    Expired,
    InvalidInput,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = ("idempotency", "futures")
QUICK = RetryPolicy(first_s=0.01, longest_s=0.02, draw=lambda: 0.0)
PATH = "/model/m/twinkle/step"


class Server(ScriptedServer):
    """Makes sessions, takes heartbeats, and answers all else as it is told."""

    def __init__(self, *replies: Reply | Callable[[Seen], Reply], offers: tuple[str, ...] = OURS) -> None:
        self._left = list(replies)
        self._offers = offers
        self.calls: list[Seen] = []
        self.heartbeats: list[Seen] = []
        self.heartbeat = Reply(200, {})
        super().__init__(self._answer)

    def _answer(self, seen: Seen) -> Reply:
        if seen.path.endswith("/create_session"):
            return Reply(200, {"session_id": "s-1", **({"offers": self._offers} if self._offers else {})})
        if seen.path.endswith("/session_heartbeat"):
            self.heartbeats.append(seen)
            return self.heartbeat
        self.calls.append(seen)
        reply = self._left.pop(0)
        return reply(seen) if callable(reply) else reply


def connect(server: ScriptedServer, *, give_up_after_s: float = 20.0, heartbeat_interval_s: float = 60.0) -> Connection:
    connection = Connection(
        find_endpoint(server.url, "k"),
        policy=QUICK,
        call_timeout_s=give_up_after_s,
        heartbeat_interval_s=heartbeat_interval_s,
    )
    opened.add(connection)
    connection.open_session()
    return connection


opened: weakref.WeakSet[Connection] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    for connection in list(opened):
        connection.close()
    wait_until(lambda: not hearts(), what="the end of all heartbeats")


def hearts() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "twinkle-heartbeat"]


# Where to, and as whom.


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000", "http://h:8000/api/v1"),
        ("http://h:8000/", "http://h:8000/api/v1"),
        ("https://h/twinkle", "https://h/twinkle/api/v1"),
        ("https://h/twinkle/api/v1/", "https://h/twinkle/api/v1"),
    ],
)
def test_the_address_ends_where_the_routes_begin(given: str, url: str) -> None:
    assert find_endpoint(given, environment={}).url == url


def test_arguments_win_over_the_environment_and_an_empty_key_is_none() -> None:
    environment = {"TWINKLE_SERVER_URL": "http://there", "TWINKLE_SERVER_TOKEN": "theirs"}

    assert find_endpoint("http://here", "mine", environment=environment).url == "http://here/api/v1"
    assert find_endpoint("", "", environment=environment).api_key.get_secret_value() == "theirs"
    nothing_said = find_endpoint(api_key="", environment={})
    assert nothing_said.url == "http://127.0.0.1:8000/api/v1"
    assert nothing_said.api_key.get_secret_value() == "EMPTY_TOKEN"


@pytest.mark.parametrize(
    ("url", "key"), [("ftp://h", "k"), ("h:8000", "k"), ("http://h", "k\nx: y"), ("http://h", "ü")]
)
def test_what_no_server_can_be_asked_with_is_refused(url: str, key: str) -> None:
    with pytest.raises(ConfigError):
        find_endpoint(url, key, environment={})


def test_each_request_carries_the_key_the_session_and_what_a_server_behind_ray_wants() -> None:
    with Server(Reply(200, None)) as server:
        connect(server).call(PATH, {})

        headers = server.calls[0].headers
        request_id = headers["x-request-id"]
        assert server.calls[0].path == f"/api/v1{PATH}"
        assert {headers[name] for name in ("x-ray-serve-request-id", "serve_multiplexed_model_id")} == {request_id}
        assert headers["serve-multiplexed-model-id"] == request_id
        assert headers["authorization"] == headers["twinkle-authorization"] == "Bearer k"
        assert headers["x-twinkle-session-id"] == "s-1"


# Sent again.


def test_outages_are_tried_again_under_the_same_key_and_the_next_call_has_another() -> None:
    full = Reply(429, {"detail": "full"})
    with Server(Reply(None), full, Reply(503, {"detail": "away"}), Reply(502, "page"), *[Reply(200, 7)] * 2) as server:
        connection = connect(server)

        assert [connection.call(PATH, {"a": 1}), connection.call(PATH, {"a": 1})] == [7, 7]
        keys = [seen.headers["x-idempotency-key"] for seen in server.calls]
        assert len(keys) == 6 and len(set(keys[:5])) == 1 and keys[5] != keys[0]
        assert {seen.content for seen in server.calls} == {b'{"a": 1}'}


def test_a_server_that_does_not_know_the_keys_gets_no_call_twice_whose_fate_is_unknown() -> None:
    with Server(Reply(None), offers=()) as server:
        with pytest.raises(Unavailable, match="not known"):
            connect(server).call(PATH, {})
        assert len(server.calls) == 1


def test_a_server_that_does_not_know_the_keys_is_asked_again_when_it_has_done_nothing() -> None:
    with Server(Reply(503, {"detail": "starting"}), Reply(429, {"detail": "full"}), Reply(200, 1), offers=()) as server:
        assert connect(server).call(PATH, {}) == 1
        assert "prefer" not in server.calls[0].headers


def test_what_the_server_says_about_when_to_come_back_is_kept() -> None:
    pauses: list[float] = []
    with Server(Reply(429, {"detail": "full"}, {"Retry-After": "3"}), Reply(200, 1)) as server:
        connection = connect(server)
        connection._sender._sleep = pauses.append
        connection.call(PATH, {})

    assert len(pauses) == 1 and pauses[0] >= 3


@pytest.mark.parametrize(("reply", "error"), [(Reply(429, {"detail": "full"}), Overloaded), (Reply(None), Unavailable)])
def test_it_gives_up_at_the_deadline(reply: Reply, error: type[Exception]) -> None:
    with Server(*[reply] * 1000) as server, pytest.raises(error):
        connect(server, give_up_after_s=0.2).call(PATH, {})


def test_a_server_that_is_not_there_is_said() -> None:
    connection = Connection(find_endpoint(f"http://127.0.0.1:{free_port()}"), policy=QUICK, call_timeout_s=0.1)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        connection.open_session()


# Errors.


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (Reply(400, {"detail": "lr: must be above 0", "code": "invalid_input"}), InvalidInput, "lr: must be above 0"),
        (Reply(409, {"detail": "taken", "code": "conflict"}), Conflict, "taken"),
        (Reply(401, {"detail": "no such key", "code": "unauthenticated"}), Unauthenticated, "no such key"),
        (Reply(404, {"detail": "Training run x not found"}), NotFound, "Training run x not found"),
        (Reply(410, {"detail": "Iterator exhausted"}), Expired, "Iterator exhausted"),
        (Reply(500, {"detail": "the worker is gone", "code": "poison"}), CallFailed, "the worker is gone"),
        (
            Reply(422, {"detail": [{"loc": ["body", "config"], "msg": "should be a string"}]}),
            Exception,
            "config: should be a string",
        ),
        (Reply(404, "a page"), NotFound, "404 Not Found"),
    ],
)
def test_a_refusal_is_an_error_in_the_servers_words_and_is_not_tried_again(
    reply: Reply, error: type[Exception], words: str
) -> None:
    with Server(reply) as server:
        with pytest.raises(error) as caught:
            connect(server).call(PATH, {})
        assert words in str(caught.value)
        assert len(server.calls) == 1


def test_a_servers_traceback_is_never_shown() -> None:
    insides = 'Traceback (most recent call last):\n  File "/srv/x.py", line 1\nAssertionError: Adapter zzz not found\n'
    with Server(Reply(500, {"detail": insides})) as server, pytest.raises(CallFailed) as caught:
        connect(server).call(PATH, {})

    assert str(caught.value) == "AssertionError: Adapter zzz not found"


def test_an_answer_that_is_none_is_said() -> None:
    with ScriptedServer(lambda _: Reply(200, ["a", "list"])) as server, pytest.raises(Exception, match="dialect"):
        connect(server)


# Long calls.


def test_a_long_call_is_accepted_at_once_and_asked_for_until_it_is_done() -> None:
    pending = Reply(202, {"request_id": "r/1"})
    with Server(pending, pending, Reply(None), Reply(200, {"result": 5})) as server:
        assert connect(server).call(PATH, {}) == {"result": 5}

        assert server.calls[0].headers["prefer"].startswith("respond-async, wait=")
        asked = {seen.path for seen in server.calls[1:]}
        assert asked == {"/api/v1/twinkle/futures/r%2F1?wait_s=20"}


def test_a_call_that_takes_too_long_says_how_to_get_its_outcome() -> None:
    pending = Reply(202, {"request_id": "r-1"})
    with Server(*[pending] * 10000) as server, pytest.raises(TimeoutError, match="r-1"):
        connect(server).call(PATH, {}, timeout_s=0.2)


# Life.


def test_the_session_is_kept_alive_until_the_connection_is_closed() -> None:
    with Server() as server:
        connection = connect(server, heartbeat_interval_s=0.01)
        wait_until(lambda: len(server.heartbeats) >= 2, what="heartbeats")
        connection.close()

        assert json.loads(server.heartbeats[0].content) == {"session_id": "s-1"}
        with pytest.raises(ClientClosed):
            connection.call(PATH, {})


def test_a_lost_session_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server, caplog.at_level(logging.ERROR, logger="twinkle_client.connection"):
        server.heartbeat = Reply(404, {"detail": "Unknown session"})
        connection = connect(server, heartbeat_interval_s=0.01)
        wait_until(lambda: connection.is_session_lost, what="the loss")
        connection.beat()
        connection.close()

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "s-1 is lost: Unknown session" in said[0]


def test_heartbeats_end_with_the_connection_that_nobody_holds() -> None:
    with Server() as server:
        connect(server)
        wait_until(lambda: not hearts(), what="their end")


def test_a_forked_process_has_connections_and_a_heart_of_its_own() -> None:
    script = (
        "import os, sys; from twinkle_client import init_twinkle_client\n"
        "from twinkle_client.connection import current\n"
        "client = init_twinkle_client(sys.argv[1], session_heartbeat_interval=0.02)\n"
        "print(current().call('/model/m/twinkle/step', {'who': 'parent'}), flush=True)\n"
        "pid = os.fork()\n"
        "print(current().call('/model/m/twinkle/step', {'who': 'child' if pid == 0 else 'parent'}), flush=True)\n"
        "import time\n"
        "if pid == 0:\n"
        "    import threading; print([t.name for t in threading.enumerate()].count('twinkle-heartbeat'), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)"
    )
    with Server(*[Reply(200, "done")] * 3) as server:
        said = subprocess.run(
            [sys.executable, "-c", script, server.url], capture_output=True, text=True, timeout=120, check=True
        ).stdout

    assert sorted(said.split()) == ["1", "done", "done", "done"]


def test_keywords_that_the_call_does_not_know_are_named_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_client.client.use", lambda connection: None)
    with Server() as server, capture_logs() as logs, init_twinkle_client(server.url, "k", session_meta={}, seed=1):
        pass

    said = [(line["keyword"], line["next"]) for line in logs if line["event"] == "keyword.without_effect"]
    assert said == [("session_meta", "did you mean session_metadata?"), ("seed", "leave it out")]


def test_the_client_needs_only_what_an_install_without_extras_brings() -> None:
    script = (
        "import sys\n"
        "allowed = set(sys.argv[1].split())\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] not in allowed and not name.startswith('_sysconfig'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "import twinkle_client.client, twinkle_client.model, twinkle_client.sampler, twinkle_client.types\n"
        "from twinkle import init_twinkle_client\n"
        "from twinkle_client import get_logger\n"
        "from twinkle_client.reward import FormatReward\n"
        "print(get_logger().name, FormatReward()([{'messages': []}], []))"
    )
    allowed = " ".join({*sys.stdlib_module_names, *base_modules(), "twinkle", "twinkle_client"})
    done = subprocess.run([sys.executable, "-c", script, allowed], capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("twinkle [0.0]\n", 0), done.stderr


def base_modules() -> set[str]:
    """The top-level modules of the base dependencies and of all that these require."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    left = [Requirement(text) for text in project["dependencies"]]
    found: set[str] = set()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        left += [Requirement(text) for text in metadata.requires(name) or ()]
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if any(canonicalize_name(owner) in found for owner in owners)
    }


# Questions.


@pytest.fixture
def client() -> Iterator[Callable[[Server], TwinkleClient]]:
    made: list[TwinkleClient] = []

    def make(server: Server) -> TwinkleClient:
        made.append(TwinkleClient(server.url))
        return made[-1]

    yield make
    for client in made:
        client.close()


RUN = {"training_run_id": "s-1-a", "base_model": "m", "model_owner": "o", "lora_rank": 4, "unheard_of": 1}
CHECKPOINT = {
    "checkpoint_id": "weights/step-1",
    "checkpoint_type": "training",
    "time": "2026-11-20T22:57:00.858118",
    "twinkle_path": "twinkle://s-1-a/weights/step-1",
}


def test_runs_are_typed_and_paged(client: Callable[[Server], TwinkleClient]) -> None:
    def page(total: int) -> dict[str, object]:
        return {"training_runs": [RUN], "cursor": {"limit": 1, "offset": 0, "total_count": total}}

    with Server(Reply(200, page(1)), Reply(200, page(2)), Reply(200, page(2)), Reply(200, RUN)) as server:
        asked = client(server)

        assert asked.list_training_runs(limit=1)[0].lora_rank == 4
        assert len(asked.find_training_run_by_model("m")) == 2
        assert asked.get_training_run("s-1-a").base_model == "m"
        assert [seen.path.partition("/twinkle")[2] for seen in server.calls] == [
            "/training_runs?limit=1&offset=0",
            "/training_runs?limit=100&offset=0",
            "/training_runs?limit=100&offset=1",
            "/training_runs/s-1-a",
        ]


def test_checkpoints_are_found_and_deleted_by_ids_with_slashes(client: Callable[[Server], TwinkleClient]) -> None:
    listed = Reply(200, {"checkpoints": [CHECKPOINT], "cursor": {"limit": 20, "offset": 0, "total_count": 1}})
    path = Reply(200, {"path": "/x", "twinkle_path": "twinkle://s-1-a/weights/step-1"})
    info = Reply(200, {"base_model": "m", "lora_rank": 4})
    with Server(listed, listed, path, path, Reply(200, {"success": True, "message": "gone"}), info) as server:
        asked = client(server)

        assert asked.list_checkpoints("s-1-a")[0].time.year == 2026
        assert asked.get_latest_checkpoint_path("s-1-a") == "/x"
        assert asked.get_checkpoint_twinkle_path("s-1-a", "weights/step-1") == "twinkle://s-1-a/weights/step-1"
        assert asked.delete_checkpoint("s-1-a", "weights/step-1").success
        assert asked.get_weights_info("twinkle://s-1-a/weights/step-1").lora_rank == 4
        assert server.calls[4].method == "DELETE"
        assert server.calls[4].path == "/api/v1/twinkle/training_runs/s-1-a/checkpoints/weights/step-1"


def test_health_and_capacity(client: Callable[[Server], TwinkleClient]) -> None:
    capacity = Reply(200, {"max_loras": 5, "used_loras": 1, "free_loras": 4})
    models = Reply(200, {"supported_models": [{"model_name": "m"}]})
    with Server(Reply(200, {"status": "ok"}), Reply(500, {"detail": "no"}), capacity, models) as server:
        asked = client(server)

        assert [asked.health_check(), asked.health_check()] == [True, False]
        assert asked.get_capacity_info().free_loras == 4
        assert asked.get_server_capabilities().supported_models[0].model_name == "m"


def test_an_outcome_is_collected_by_its_id_alone(client: Callable[[Server], TwinkleClient]) -> None:
    saved = {"twinkle_path": "twinkle://r/weights/w", "checkpoint_dir": None}
    with Server(Reply(202, {}), Reply(200, saved)) as server:
        assert client(server).future("r-7").result(timeout=20).twinkle_path == "twinkle://r/weights/w"


def test_a_second_session_takes_the_place_of_the_first(client: Callable[[Server], TwinkleClient]) -> None:
    with Server() as server:
        asked = client(server)
        assert asked.create_session({"name": "x"}) == asked.session_id == "s-1"
        assert not asked.is_session_lost
